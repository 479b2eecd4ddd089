#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <launcher/elastic/agent_link.h>
#include <launcher/error_file.h>
#include <launcher/event_loop.h>
#include <launcher/file_limit.h>
#include <launcher/job.h>
#include <launcher/output.h>
#include <launcher/signals.h>
#include <launcher/unique_fd.h>
#include <launcher/worker_group.h>

namespace ddp::launcher {

/// Starts the workers of one job, watches them, and ends them all when one fails or when it is told
/// to; then, as often as it may, starts them all again. In an elastic job it does so as its agent
/// says, and says to it how its workers fare (supervisor_elastic.cpp). Runs in the guardian process
/// (see Note [Front and guardian]), which must be a child subreaper and single-threaded. One loop;
/// nothing is polled.
class Supervisor {
 public:
  /// `control_fd` gives one byte for each signal that the launcher got, and end-of-file when the
  /// launcher died. `agent`: the socket to the agent of an elastic job, else empty. Throws Error.
  Supervisor(Job& job, const SignalTakeover& signals, int control_fd, UniqueFd agent);

  /// Returns the launcher's exit status. No descendant is left then, and all that they wrote has
  /// been shown.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    kMeeting,  ///< elastic, without workers: the agent's word is awaited
    kRunning,
    kStopping,       ///< the workers have been told to end; they are killed at `deadline_`
    kLeftovers,      ///< the workers have ended; what they left may end until `deadline_`
    kLeftoversTold,  ///< and has been told to; it is killed at `deadline_`
    kEnded,          ///< no process is left; in haste, what is not shown at `deadline_` never is
  };

  bool run_attempt();
  void start_workers();
  ErrorFiles make_error_files() const;
  void wait_for_events();
  int wait_timeout() const;
  bool in_haste() const;
  void handle_control();
  void handle_signal(int signal);
  void end_by_signal(int signal);
  void reap();
  void act();
  bool act_once();
  void stop(int signal);
  void end_leftovers();
  void tell_leftovers();
  void kill_all();
  bool may_restart() const;
  void collect_errors();
  void tell_root_cause() const;
  std::string host() const;
  int report();
  int stopped_report();
  std::string timeout_text() const;

  int run_elastic();
  bool meet();
  bool work_done() const;
  void await_word();
  bool over() const;
  void tell_failure();
  bool act_on_word();
  void part();
  int elastic_report();
  int failed_report();
  void say_failure(const std::string& ending);
  std::string verdict() const;

  Job& job_;
  const SignalTakeover& signals_;
  int control_fd_;
  FileLimit limit_;
  EventLoop loop_;
  UniqueFd child_signal_;
  Output output_;
  ErrorFiles error_files_;
  std::optional<WorkerGroup> workers_;  ///< of the present attempt
  std::optional<AgentLink> agent_;      ///< of an elastic job

  int attempt_ = 0;
  int restarts_ = 0;  ///< attempts that followed a failure
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_;
  std::optional<Clock::time_point> job_deadline_;
  int stop_signal_ = 0;       ///< sent to the launcher by its user, 0: none
  bool told_to_end_ = false;  ///< by a signal, in whatever phase
  bool timed_out_ = false;
  bool parting_ = false;  ///< elastic: all is said, the agent may end until `deadline_`
  bool hurried_ = false;  ///< it is told to end while it does
  bool front_died_ = false;
  bool child_signaled_ = false;
  bool childless_ = false;  ///< no child is left, and so no descendant
};

}  // namespace ddp::launcher
