#pragma once

#include <signal.h>

#include <string>

namespace ddp::launcher {

/// "SIGSEGV" for 11 and so on; "signal 77" for one without a name.
std::string signal_name(int signal);

/// The signals of this process as they were when it started, taken over by the launcher:
/// SIGCHLD and those that end or stop a job are blocked (they are read in order by the loops), and
/// writing to a closed pipe is an error instead of the end. A signal that was ignored from the
/// start (nohup, a shell's background job) stays ignored.
class SignalTakeover {
 public:
  SignalTakeover();

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
