#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/comm_hooks/hook_collectives.h>

namespace ddp::comm_hooks::detail {

/// Runs the buckets of a hook that communicates in several steps, one bucket after the other in the
/// order in which they came, beside backward. So the hook's collectives have the same order on all
/// ranks. (Steps chained as callbacks of futures, as Python has them, do not: the callbacks of two
/// buckets race, and Gloo then adds up what does not belong together.)
///
/// On a device whose works do not block the host (CUDA) a job runs at once, in the calling thread.
///
/// Thread safety: one thread calls `run` and the destructor; `wait` is for jobs.
class HookWorker {
 public:
  /// Returns the reduced values; runs without recording gradients.
  using Job = std::function<at::Tensor()>;

  HookWorker() = default;
  /// Ends within a second: a job in flight is told, and its future and those behind it fail.
  ~HookWorker();
  HookWorker(const HookWorker&) = delete;
  HookWorker& operator=(const HookWorker&) = delete;

  /// Queues `job`, whose tensors are on the device of `buffer`. The future holds what it returns or
  /// throws. The thread starts with the first job.
  FuturePtr run(const at::Tensor& buffer, Job job);

  /// Inside a job: waits for a collective. Throws where it failed, or the worker is being
  /// destroyed.
  void wait(c10d::Work& work);

 private:
  struct Entry {
    Job job;
    FuturePtr future;
  };

  void work();
  bool is_stopping();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool stopping_ = false;
  bool runs_at_once_ = false;
  std::thread thread_;
};

}  // namespace ddp::comm_hooks::detail
