#pragma once

#include <cstdint>

#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/reducer/comm_hook.h>

// Communication hooks that send each gradient as one byte, with the arithmetic of Python's
// torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks. Every rank gathers all ranks'
// bytes and takes the mean itself: the wire carries world size times a quarter of a float32 bucket,
// which is less than an all-reduce does only on few ranks.
//
// Complex buckets travel as pairs of reals. `group` is the model's; empty: the default group. From
// the first pass on a thread of the hook runs the collectives beside backward; see `power_sgd` for
// what a model that communicates in its own backward needs. Infinities and NaNs are lost. Each
// function throws UsageError where this rank is not in the group.

namespace ddp::comm_hooks {

/// One scale and zero point for the whole bucket.
///
///     model->register_comm_hook(ddp::comm_hooks::quantization_per_tensor());
CommHook quantization_per_tensor(const ProcessGroup& group = {});

/// Options of `quantization_per_channel`, the same on all ranks.
class QuantizationPerChannelOptions {
 public:
  /// Elements that share a scale and a zero point.
  TORCH_ARG(std::int64_t, channel_size) = 512;
};

/// A scale and zero point for every 512 elements: finer, for large buckets. Throws UsageError also
/// where `channel_size` is not positive.
CommHook quantization_per_channel(const QuantizationPerChannelOptions& options = {},
                                  const ProcessGroup& group = {});

}  // namespace ddp::comm_hooks
