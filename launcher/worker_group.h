#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include <launcher/error_file.h>
#include <launcher/event_loop.h>
#include <launcher/file_limit.h>
#include <launcher/job.h>
#include <launcher/output.h>
#include <launcher/signals.h>
#include <launcher/spawn.h>
#include <launcher/unique_fd.h>
#include <launcher/worker.h>

namespace ddp::launcher {

/// The workers of one attempt: starts them, takes their ends in the order in which they came, and
/// reaches them with signals.
class WorkerGroup {
 public:
  /// The arguments must outlive this object.
  WorkerGroup(const Job& job, const SignalTakeover& signals, EventLoop& loop,
              const FileLimit& limit);

  /// Starts them all, or as many as have been when `go_on`, asked after each, gives false. Throws
  /// Error where one cannot be started; the others are then running.
  void start(const Master& master, int attempt, Output& output, const ErrorFiles& errors,
             const std::function<bool()>& go_on);

  /// The loop says that this worker has ended.
  void handle_end(size_t index);

  /// A child was reaped: a worker or something that one had started.
  void reaped(pid_t pid, int wait_status);

  /// Who ends from now on has not failed by himself.
  void expect_ends();

  /// To be called when all have ended and what they left was read: finds the root cause among the
  /// failures, see order_failures.
  void order_failures();

  /// To each worker's process group, or to the worker alone.
  void signal_groups(int signal) const;
  void signal_workers(int signal) const;

  /// To be called after children were reaped, see Worker::group_alive.
  void forget_empty_groups();
  bool groups_empty() const;

  size_t running() const { return running_; }
  const std::vector<Worker>& workers() const { return workers_; }
  std::vector<Worker>& workers() { return workers_; }

  /// Who failed by himself, the first one first; after order_failures the root cause.
  const std::vector<size_t>& failures() const { return failures_; }

  /// Why the program could not be executed; 0: it could.
  int exec_error() const { return exec_error_; }

 private:
  void ended(Worker& worker, int wait_status);

  const Job& job_;
  const SignalTakeover& signals_;
  EventLoop& loop_;
  const FileLimit& limit_;
  SharedErrors exec_errors_;
  std::vector<Worker> workers_;
  std::vector<UniqueFd> pidfds_;
  std::vector<size_t> failures_;
  size_t running_ = 0;
  std::optional<std::chrono::system_clock::time_point> ends_expected_;  ///< since when
  int exec_error_ = 0;
};

}  // namespace ddp::launcher
