#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp::detail {

/// How a work of a process group is waited for.
enum class WaitKind : std::uint8_t {
  kHost,    // the calling thread blocks until it is done
  kStream,  // the device's current stream waits, the thread does not: NCCL's works
};

/// How `group`'s works on tensors of `device` are waited for. Thread-safe.
WaitKind wait_kind(c10d::ProcessGroup& group, const c10::Device& device);

/// Whether the backend for `device` divides a sum by the number of ranks itself (ReduceOp::AVG,
/// each rank's values multiplied before they are added), in one kernel with the reduction: NCCL.
bool averages_natively(c10d::ProcessGroup& group, const c10::Device& device, c10::ScalarType dtype);

}  // namespace ddp::detail
