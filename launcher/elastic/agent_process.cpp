#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include <fmt/format.h>

#include <launcher/elastic/agent.h>
#include <launcher/elastic/agent_process.h>
#include <launcher/error.h>
#include <launcher/process_name.h>

namespace ddp::launcher {
namespace {

constexpr std::chrono::milliseconds kEndLimit{3000};
constexpr timespec kPause{0, 5000000};

[[noreturn]] void be_agent(const Job& job, UniqueFd link, int argc, char** argv) {
  ::setsid();
  rename_process(argc, argv, "ddp-rendezvous");
  // A pipe that the launcher reads or writes must not stay open because of this process.
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(nothing, STDOUT_FILENO);
  run_agent(job, job.store_plugin, std::move(link));
  ::_exit(0);
}

}  // namespace

AgentProcess::AgentProcess(const Job& job, int argc, char** argv) {
  if (!job.options.elastic) return;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Error(ExitStatus::kSetup, fmt::format("cannot make a socket: {}", std::strerror(errno)));
  }
  link_ = UniqueFd(ends[0]);
  UniqueFd agents_end(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) {
    throw Error(ExitStatus::kSetup, fmt::format("cannot fork: {}", std::strerror(errno)));
  }
  if (pid_ == 0) {
    link_.reset();
    be_agent(job, std::move(agents_end), argc, argv);
  }
}

void AgentProcess::await_end() const {
  if (pid_ == 0) return;
  const auto deadline = std::chrono::steady_clock::now() + kEndLimit;
  while (::waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      return;
    }
    ::nanosleep(&kPause, nullptr);
  }
}

}  // namespace ddp::launcher
