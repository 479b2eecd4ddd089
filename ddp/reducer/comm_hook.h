#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace ddp {

/// Communicates one bucket of gradients in place of the reducer's averaging all-reduce.
///
/// It is called once a pass for each bucket, in the order of the buckets on every rank, from the
/// thread that runs backward, and holds that up until it returns. `bucket` is valid during the call
/// only; its tensors may be kept. The future holds the reduced tensor (or a list whose first
/// element it is): the bucket's buffer or another tensor of as many elements, which may be of
/// another floating dtype. The hook divides by the world size itself.
///
/// A hook that throws, returns no future, one that fails or one that holds something else ends the
/// backward pass with a CommunicationError that names the bucket; the rank leaves the group, so
/// that its peers end as well.
///
/// Collectives that the hook starts later than in the call itself (in a callback of a future, in a
/// thread) must come in the same order on all ranks: Gloo matches them by their number.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket&)>;

namespace detail {

/// The tensor in what a hook's future holds. Throws std::runtime_error, which says what it found.
at::Tensor parse_hook_result(const c10::IValue& result);

}  // namespace detail
}  // namespace ddp
