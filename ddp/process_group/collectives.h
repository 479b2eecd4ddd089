#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/work.h>

namespace ddp {

/// How ranks' values are combined: `ddp::ReduceOp::SUM`, `AVG` (floating point), `PRODUCT`, `MIN`,
/// `MAX`, and for integers `BAND`, `BOR`, `BXOR`. c10d's own type.
using ReduceOp = c10d::ReduceOp;

/// Options of `all_reduce`.
class AllReduceOptions {
 public:
  AllReduceOptions() = default;
  /* implicit */ AllReduceOptions(ReduceOp::RedOpType op) : op_(op) {}
  TORCH_ARG(ReduceOp, op) = ReduceOp(ReduceOp::SUM);
  /// Return at once; the result is there after `Work::wait()`.
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `broadcast`.
class BroadcastOptions {
 public:
  BroadcastOptions() = default;
  /* implicit */ BroadcastOptions(int src) : src_(src) {}
  /// The rank (in the group) whose tensor all others get.
  TORCH_ARG(int, src) = 0;
  TORCH_ARG(bool, async_op) = false;
};

// Every rank of the group calls the same collectives in the same order, with tensors of the same
// shape and dtype. Tensors are dense and contiguous. Not thread-safe: calls on one group from
// several threads would pair up at random. Errors: UsageError before anything is sent (no group, a
// rank out of range, a tensor that cannot be sent), CommunicationError afterwards (a rank left, or
// did not answer within the group's timeout).

/// Combines the ranks' tensors element by element; every rank's `tensor` gets the result.
Work all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {}, const ProcessGroup& group = {});

/// Every rank's `tensor` gets the values of rank `src`'s.
Work broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {}, const ProcessGroup& group = {});

/// Returns when every rank of the group has called it.
void barrier(const ProcessGroup& group = {});

}  // namespace ddp
