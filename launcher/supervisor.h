#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <launcher/job.h>
#include <launcher/signals.h>
#include <launcher/spawn.h>
#include <launcher/unique_fd.h>
#include <launcher/worker.h>

namespace ddp::launcher {

/// Starts the workers of one job, watches them, and ends them all when one fails or when it is told
/// to. Runs in the guardian process (see Note [Front and guardian]), which must be a child
/// subreaper and single-threaded. One loop over epoll; nothing is polled.
class Supervisor {
 public:
  /// `control_fd` gives one byte for each signal that the launcher got, and end-of-file when the
  /// launcher died.
  Supervisor(const Job& job, const SignalTakeover& signals, int control_fd);

  /// Returns the launcher's exit status. No descendant is left then.
  int run();

 private:
  enum class Phase {
    kRunning,
    kStopping,  ///< the workers have been told to end; they are killed at `deadline_`
    kKilled,    ///< everything has been killed and reaped
  };

  void watch(int fd, uint64_t tag);
  bool start_workers();
  void wait_for_events();
  bool handle_events(int timeout);
  void handle_control();
  void handle_signal(int signal);
  void worker_ended(Worker& worker, int wait_status);
  void forget_empty_groups();
  void child_reaped(pid_t pid, int wait_status);
  void act();
  void stop(int signal);
  void kill_all();
  void end_leftovers();
  void signal_groups(int signal) const;
  bool finished() const;
  int finish();
  int wait_timeout() const;

  const Job& job_;
  const SignalTakeover& signals_;
  int control_fd_;
  UniqueFd epoll_;
  UniqueFd child_signal_;
  SharedErrors exec_errors_;
  std::vector<Worker> workers_;
  std::vector<UniqueFd> pidfds_;
  std::vector<size_t> failures_;
  size_t running_ = 0;
  Phase phase_ = Phase::kRunning;
  int exec_error_ = 0;   ///< why the program could not be executed, 0: it could
  int stop_signal_ = 0;  ///< sent to the launcher by its user, 0: none
  bool front_died_ = false;
  bool child_signaled_ = false;
  std::chrono::steady_clock::time_point deadline_;
};

}  // namespace ddp::launcher
