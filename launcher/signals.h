#pragma once

#include <signal.h>

#include <set>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// "SIGSEGV" for 11 and so on; "signal 77" for one without a name.
std::string signal_name(int signal);

/// 15 for "SIGTERM" or "TERM"; 0 where there is no such signal.
int signal_number(std::string_view name);

/// Whether the launcher can pass this signal on: it can be caught, and neither stops a process nor
/// tells of a child or of a fault of the launcher's own.
bool may_be_handled(int signal);

/// The signals of this process as they were when it started, taken over by the launcher:
/// SIGCHLD and those that end, stop or reach a job are blocked (they are read in order by the
/// loops), and writing to a closed pipe is an error instead of the end. A signal that was ignored
/// from the start (nohup, a shell's background job) stays ignored.
class SignalTakeover {
 public:
  /// `ending`: those that end the job. SIGUSR1 and SIGUSR2 are passed on, SIGTSTP and SIGCONT
  /// stop and continue it; every other signal does to the launcher what it does to any program.
  explicit SignalTakeover(const std::set<int>& ending);

  /// What is blocked and to be waited for.
  const sigset_t& handled() const { return handled_; }

  /// Gives the calling process the signals that the launcher was started with. Async-signal-safe.
  void restore() const;

 private:
  sigset_t handled_;
  sigset_t original_mask_;
  struct sigaction original_sigpipe_;
};

}  // namespace ddp::launcher
