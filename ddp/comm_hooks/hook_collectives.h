#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/process_group/process_group.h>

// What communication hooks are made of. Thread-safe; errors of the transport come out of the
// futures and works, as the backend has them.

namespace ddp::comm_hooks::detail {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// The group that a hook is to use; refuses one that this rank is not in.
ProcessGroup hook_group(const ProcessGroup& group);

/// The tensor as reals, which is what every backend can sum.
at::Tensor as_real(const at::Tensor& tensor);

/// Starts an all-reduce that sums in place. `tensor` is contiguous.
c10::intrusive_ptr<c10d::Work> start_sum(const ProcessGroup& group, const at::Tensor& tensor);

/// Divides by the world size and then sums, so that half precision does not overflow; the future
/// holds `tensor`.
FuturePtr start_average(const ProcessGroup& group, const at::Tensor& tensor);

/// A future that holds `tensor` already.
FuturePtr completed(const at::Tensor& tensor);

}  // namespace ddp::comm_hooks::detail
