#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/reduce_op.h>
#include <ddp/process_group/work.h>

// Collectives that combine the ranks' values; <ddp/process_group/collectives.h> says what is
// common.

namespace ddp {

/// Options of `all_reduce`.
class AllReduceOptions {
 public:
  AllReduceOptions() = default;
  /* implicit */ AllReduceOptions(ReduceOp::RedOpType op) : op_(op) {}
  TORCH_ARG(ReduceOp, op) = ReduceOp(ReduceOp::SUM);
  /// Return at once; the result is there after `Work::wait()`.
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `reduce`.
class ReduceOptions {
 public:
  ReduceOptions() = default;
  /* implicit */ ReduceOptions(int dst) : dst_(dst) {}
  /// The rank in the group that gets the result.
  TORCH_ARG(int, dst) = 0;
  TORCH_ARG(ReduceOp, op) = ReduceOp(ReduceOp::SUM);
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `reduce_scatter` and `reduce_scatter_tensor`.
class ReduceScatterOptions {
 public:
  ReduceScatterOptions() = default;
  /* implicit */ ReduceScatterOptions(ReduceOp::RedOpType op) : op_(op) {}
  TORCH_ARG(ReduceOp, op) = ReduceOp(ReduceOp::SUM);
  TORCH_ARG(bool, async_op) = false;
};

/// Combines the ranks' tensors element by element; every rank's `tensor` gets the result.
///
///     ddp::all_reduce(loss);                        // the sum
///     ddp::all_reduce(found, ddp::ReduceOp::MAX);
Work all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {},
                const ProcessGroup& group = {});

/// The same, for rank `dst` alone; what the other ranks' tensors hold afterwards is not defined.
Work reduce(const at::Tensor& tensor, const ReduceOptions& options = {},
            const ProcessGroup& group = {});

/// Combines the ranks' lists `inputs` element by element; rank r's `output` gets the combined
/// inputs[r]. `inputs` has a contiguous tensor for each rank, all of `output`'s dtype and size.
Work reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                    const ReduceScatterOptions& options = {}, const ProcessGroup& group = {});

/// The same with the list in one tensor: `input` holds world size times `output`'s elements, rank
/// after rank.
Work reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options = {},
                           const ProcessGroup& group = {});

}  // namespace ddp
