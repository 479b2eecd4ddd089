#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <launcher/descendants.h>
#include <launcher/elastic/agent_process.h>
#include <launcher/error.h>
#include <launcher/guardian.h>
#include <launcher/message.h>
#include <launcher/outer_launcher.h>
#include <launcher/process_name.h>
#include <launcher/signals.h>
#include <launcher/standard_fds.h>
#include <launcher/supervisor.h>
#include <launcher/unique_fd.h>

// Note [Front and guardian]
// Nothing that a job starts may outlive the launcher, even when that is killed with SIGKILL, and a
// process that is killed cannot clean up. So there are two:
//
//   front (the pid that the user knows)  --pipe-->  guardian  ---->  workers, each its own session
//
// The guardian is the parent of the workers and a child subreaper: whatever they leave behind,
// also what has made itself a session of its own, becomes its child in the end, so a walk down from
// it finds everything, and having no child means that nothing is left.
//   - The front waits. It passes each signal it gets as a byte through the pipe, and ends with the
//     guardian's exit status.
//   - When the front is killed the guardian reads end-of-file, and kills everything below it.
//   - When the guardian is killed its workers get SIGKILL from the kernel (PR_SET_PDEATHSIG); what
//     they had started becomes the child of the front, a subreaper as well, which kills it.
//   - When the front is stopped (SIGSTOP), the job goes on.
// An elastic job has a third, see Note [Agent].
// The guardian is in a session of its own, under a name of its own: what kills a whole terminal,
// a process group or "everything called launch" does not hit both.

namespace ddp::launcher {
namespace {

constexpr std::chrono::milliseconds kKillLimit{10000};

/// The children that this process had before it started anything: a shell that runs things in the
/// background and then replaces itself by the launcher leaves it some. They are none of its
/// business.
std::vector<pid_t> existing_children() {
  siginfo_t info{};
  if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0) return {};
  std::vector<pid_t> children;
  for (const Process& process : descendants_of(::getpid())) {
    if (process.parent == ::getpid()) children.push_back(process.pid);
  }
  return children;
}

[[noreturn]] void be_guardian(Job& job, const SignalTakeover& signals, UniqueFd control,
                              UniqueFd agent, int argc, char** argv) {
  int status = ExitStatus::kSetup;
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  rename_process(argc, argv, "ddp-guardian");
  try {
    status = Supervisor(job, signals, control.get(), std::move(agent)).run();
  } catch (const Error& error) {
    say_failure(error.what());
    status = error.status();
  } catch (const std::exception& error) {
    say_failure(error.what());
  }
  ::_exit(status);
}

int guardian_lost(int signal, std::vector<pid_t> not_ours, const AgentProcess& agent) {
  if (agent.pid() != 0) not_ours.push_back(agent.pid());
  const auto immortal = kill_descendants(
      kKillLimit, [](pid_t, int) {}, not_ours);
  agent.await_end();
  print_message(fmt::format(
      "the launcher's guardian process was killed by {}; the workers were killed with it{}",
      signal_name(signal),
      immortal.empty() ? "" : fmt::format(", but not {}", fmt::join(immortal, ", "))));
  return ExitStatus::kSignalBase + signal;
}

}  // namespace

int run_job(Job job, int argc, char** argv) {
  const SignalTakeover signals(job.options.ending_signals);
  const std::vector<pid_t> not_ours = existing_children();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);

  AgentProcess agent(job, argc, argv);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(ExitStatus::kSetup, fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  }
  UniqueFd control_out(ends[0]);
  UniqueFd control_in(ends[1]);
  ::fcntl(control_in.get(), F_SETFL, O_NONBLOCK);

  const pid_t guardian = ::fork();
  if (guardian < 0) {
    throw Error(ExitStatus::kSetup, fmt::format("cannot fork: {}", std::strerror(errno)));
  }
  if (guardian == 0) {
    control_in.reset();
    be_guardian(job, signals, std::move(control_out), agent.take_link(), argc, argv);
  }
  control_out.reset();
  agent.drop_link();
  job.master.reserved.reset();
  release_standard_input();

  while (true) {
    const int signal = ::sigwaitinfo(&signals.handled(), nullptr);
    if (signal < 0) continue;  // interrupted by a stop and a continue
    if (signal == SIGCHLD) {
      int status = 0;
      if (::waitpid(guardian, &status, WNOHANG) != guardian) continue;
      if (!WIFEXITED(status)) return guardian_lost(WTERMSIG(status), not_ours, agent);
      agent.await_end();
      return WEXITSTATUS(status);
    }
    const auto byte = static_cast<unsigned char>(signal);
    // The pipe is full only after thousands of unread signals: one more would not tell more.
    [[maybe_unused]] const ssize_t written = ::write(control_in.get(), &byte, 1);
    if (signal == SIGTSTP) ::raise(SIGSTOP);
  }
}

}  // namespace ddp::launcher
