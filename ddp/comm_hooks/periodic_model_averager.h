#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>

namespace ddp {

/// Options of `PeriodicModelAverager`, the same on all ranks.
class PeriodicModelAveragerOptions {
 public:
  /* implicit */ PeriodicModelAveragerOptions(std::int64_t period) : period_(period) {}

  /// Steps from one averaging to the next. (With 1 the plain averaging of gradients costs no more.)
  TORCH_ARG(std::int64_t, period);
  /// Steps before the first averaging.
  TORCH_ARG(std::int64_t, warmup_steps) = 0;
  /// The ranks to average over; empty: the default group.
  TORCH_ARG(ProcessGroup, process_group);
};

/// Averages parameters over the ranks in some steps: in step `warmup_steps` (counted from 0), and
/// every `period` steps after it. The other half of `comm_hooks::post_local_sgd`; Python's
/// torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager.
///
/// Thread safety: the thread that trains. The constructor throws UsageError where an option is out
/// of range or this rank is not in the group.
class PeriodicModelAverager {
 public:
  explicit PeriodicModelAverager(const PeriodicModelAveragerOptions& options);

  /// To be called after every `optimizer.step()`, on every rank with the same parameters. In a step
  /// that averages, every parameter that has a gradient on any rank gets the mean of the ranks'
  /// values, in place and in one all-reduce (parameters of several dtypes as the one that holds
  /// them all); a small one before it tells which these are. Throws CommunicationError.
  ///
  /// In a job with Python ranks, all ranks must have gradients for the same parameters.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  /// How often `average_parameters` was called.
  std::int64_t step() const { return step_; }

 private:
  std::int64_t period_;
  std::int64_t warmup_steps_;
  ProcessGroup group_;
  std::int64_t step_ = 0;
};

}  // namespace ddp
