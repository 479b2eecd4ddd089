#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <ddp/process_group/process_group.h>
#include <ddp/reducer/comm_hook.h>

// Communication hooks that all-reduce a whole bucket, with the arithmetic of Python's
// torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
//
// `group` is the group of the model that the hook is for; empty: the default group. Each function
// is to be called on every rank alike, and throws UsageError where this rank has no such group. The
// hooks are thread-safe, have no state, and may serve several models.

namespace ddp::comm_hooks {

/// Divides by the world size and all-reduces: what happens without a hook, to build upon.
CommHook allreduce(const ProcessGroup& group = {});

/// Casts to half precision, divides by the world size, all-reduces, and casts back: half the bytes
/// on the wire. Gradients beyond 65504 become infinite, those below 6e-8 zero.
///
///     model->register_comm_hook(ddp::comm_hooks::fp16_compress());
CommHook fp16_compress(const ProcessGroup& group = {});

/// The same with bfloat16: the range of float32, and 8 bits of precision.
CommHook bf16_compress(const ProcessGroup& group = {});

/// Runs `hook` on a half-precision copy of the bucket. Complex buckets go to `hook` as they are.
/// Throws UsageError where `hook` is empty.
///
///     model->register_comm_hook(ddp::comm_hooks::fp16_compress_wrapper(
///         ddp::comm_hooks::power_sgd(ddp::comm_hooks::PowerSGDOptions())));
CommHook fp16_compress_wrapper(CommHook hook);

/// The same with a bfloat16 copy.
CommHook bf16_compress_wrapper(CommHook hook);

/// A hook that was written for c10d's own reducer: its `runHook`, then its `parseHookResult`, in
/// the thread that completes the future. Throws UsageError where `hook` is null.
CommHook from_native(std::shared_ptr<c10d::CommHookInterface> hook);

}  // namespace ddp::comm_hooks
