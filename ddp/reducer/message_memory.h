#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp::detail {

/// Makes a one-dimensional contiguous tensor of `numel` elements, with any values.
using MessageAllocator =
    std::function<at::Tensor(std::int64_t numel, const at::TensorOptions& options)>;

/// Takes memory that `group`'s backend communicates without a copy, where it has some to give
/// (c10d::Backend::allocateTensor: shared memory); else, and where that is used up, LibTorch's. The
/// tensors may outlive the group.
MessageAllocator message_allocator(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace ddp::detail
