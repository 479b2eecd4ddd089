// launch: starts the processes of a data-parallel job on this node. See docs/launcher.md.

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include <launcher/dry_run.h>
#include <launcher/environment.h>
#include <launcher/error.h>
#include <launcher/guardian.h>
#include <launcher/help.h>
#include <launcher/job.h>
#include <launcher/message.h>
#include <launcher/options.h>
#include <launcher/outer_launcher.h>
#include <launcher/standard_fds.h>

namespace {

using namespace ddp::launcher;

/// A launcher started by a worker of another launcher has that one's socket: its own workers must
/// not.
void drop_inherited_socket() {
  const char* number = ::getenv(kListenFdVariable);
  const int fd = number != nullptr ? std::atoi(number) : 0;
  if (fd > STDERR_FILENO) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

void print(const std::string& text) { write_all(STDOUT_FILENO, text); }

int run(int argc, char** argv) {
  Options options =
      parse_options(std::span<const char* const>(argv, static_cast<size_t>(argc)), ::getenv);
  if (options.help) {
    print(help_text());
    return 0;
  }
  if (options.version) {
    print("launch " DDP_VERSION "\n");
    return 0;
  }
  drop_inherited_socket();
  Job job = prepare_job(std::move(options), ::getenv);
  if (job.options.dry_run) {
    print(describe_job(job, environ));
    return 0;
  }
  return run_job(std::move(job), argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_fds();
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    say_failure(error.what());
    return error.status();
  } catch (const std::exception& error) {
    say_failure(error.what());
    return ExitStatus::kSetup;
  }
}
