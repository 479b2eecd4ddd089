#pragma once

#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <ddp/mixed_precision.h>
#include <ddp/process_group/process_group.h>

namespace ddp {

/// Options of `DistributedDataParallel`, with Python's names and defaults. All but
/// `gradient_as_bucket_view` are the same on every rank.
class DistributedDataParallelOptions {
 public:
  /// The module's device, one at most, where `forward` moves its inputs: tensors, also in vectors,
  /// arrays, pairs, tuples, maps and optionals. Empty, as for a module on the CPU or on several
  /// devices: inputs are taken as they are.
  TORCH_ARG(std::vector<c10::Device>, device_ids);
  /// Recorded only, as in Python: outputs stay where the module leaves them.
  TORCH_ARG(std::optional<c10::Device>, output_device);
  /// The group whose ranks train together; empty: the default group.
  TORCH_ARG(ProcessGroup, process_group);
  /// Whether rank 0's buffers (running statistics) go to all ranks before the first forward of a
  /// step.
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// Whether construction gives rank 0's values to all ranks. (That the models agree is verified in
  /// any case.)
  TORCH_ARG(bool, init_sync) = true;
  /// Size at which a bucket is closed, in MiB; 25 where not given.
  TORCH_ARG(std::optional<double>, bucket_cap_mb);
  /// Size of the first bucket, in MiB; 1 where neither is given, else `bucket_cap_mb`.
  TORCH_ARG(std::optional<double>, first_bucket_cap_mb);
  /// A parameter that takes no part in a pass contributes zeros instead of being an error. Costs a
  /// small all-reduce a pass and the better bucket layout.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Every pass uses the same layers equally often. Layers may then be used in several re-entrant
  /// checkpoints, and unused ones cost nothing after the first pass. A pass that differs is an
  /// error.
  TORCH_ARG(bool, static_graph) = false;
  /// Gradients that the program keeps beyond a pass may be overwritten by the next one. (With false
  /// they are not; neither copies them back from the buckets.)
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Names, as the module's own `named_parameters()` and `named_buffers()` have them, of what is
  /// left alone: neither given to all ranks at the start, nor averaged, nor broadcast. (Python's
  /// `_set_params_and_buffers_to_ignore_for_model`.) The same on all ranks.
  TORCH_ARG(std::vector<std::string>, ignored_parameters);
  /// Computes and communicates in a lower precision than the module's own. `backward()` is called
  /// once for the forwards before it: at its end the parameters have their own precision again.
  TORCH_ARG(std::optional<MixedPrecision>, mixed_precision);
  /// Needed in a job that has Python ranks: buffers are broadcast when Python's
  /// DistributedDataParallel does it, under `torch::NoGradGuard` too, and a second backward after
  /// one forward, which Python would leave local, is refused.
  TORCH_ARG(bool, python_compatible) = false;
};

}  // namespace ddp
