#pragma once

#include <cstddef>
#include <map>

#include <ATen/core/Tensor.h>

#include <ddp/comm_hooks/hook_worker.h>
#include <ddp/comm_hooks/low_rank.h>
#include <ddp/comm_hooks/power_sgd.h>

namespace ddp::comm_hooks::detail {

/// What PowerSGD keeps of a bucket from step to step.
struct BucketMemory {
  at::Tensor error;
  at::Tensor p;
  at::Tensor q;
};

/// The state of one PowerSGD hook. `memory` and `seeds` are used by the worker's jobs alone, `step`
/// by the thread that calls the hook. The worker comes last: it ends before what its jobs use.
struct PowerSGDState {
  /// `name` is the function's, for errors. Throws UsageError.
  PowerSGDState(const PowerSGDOptions& options, const ProcessGroup& group, const char* name);

  /// Whether this bucket is all-reduced whole, since the start has not come. Counts the steps.
  bool is_before_start(const c10d::GradBucket& bucket);

  /// Adds the last step's error to `values`, a bucket or what was made of one. Throws
  /// std::runtime_error where that bucket had another size.
  void add_error(const BucketMemory& memory, const at::Tensor& values) const;

  PowerSGDOptions options;
  ProcessGroup group;
  StartSeeds seeds;
  std::int64_t step = 0;
  std::map<std::size_t, BucketMemory> memory;
  HookWorker worker;
};

}  // namespace ddp::comm_hooks::detail
