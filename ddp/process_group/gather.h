#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/work.h>

// Collectives that hand values from one rank to many and back;
// <ddp/process_group/collectives.h> says what is common.

namespace ddp {

/// Options of `broadcast` and `broadcast_object`.
class BroadcastOptions {
 public:
  BroadcastOptions() = default;
  /* implicit */ BroadcastOptions(int src) : src_(src) {}
  /// The rank in the group whose tensor all others get.
  TORCH_ARG(int, src) = 0;
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `all_gather` and `all_gather_into_tensor`.
class AllGatherOptions {
 public:
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `gather` and `gather_object`.
class GatherOptions {
 public:
  GatherOptions() = default;
  /* implicit */ GatherOptions(int dst) : dst_(dst) {}
  /// The rank in the group that gets the list.
  TORCH_ARG(int, dst) = 0;
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `scatter` and `scatter_object`.
class ScatterOptions {
 public:
  ScatterOptions() = default;
  /* implicit */ ScatterOptions(int src) : src_(src) {}
  /// The rank in the group that brings the list.
  TORCH_ARG(int, src) = 0;
  TORCH_ARG(bool, async_op) = false;
};

/// Every rank's `tensor` gets the values of rank `src`'s.
Work broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {},
               const ProcessGroup& group = {});

/// Every rank's outputs[r] gets rank r's `input`. `outputs` has a contiguous tensor for each rank,
/// all of `input`'s dtype and size.
Work all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                const AllGatherOptions& options = {}, const ProcessGroup& group = {});

/// The same into one tensor of world size times `input`'s elements, rank after rank.
Work all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const AllGatherOptions& options = {}, const ProcessGroup& group = {});

/// Rank `dst`'s outputs[r] gets rank r's `input`; on the other ranks `outputs` is empty.
///
///     std::vector<at::Tensor> all;
///     if (ddp::get_rank() == 0)
///       for (int rank = 0; rank < ddp::get_world_size(); ++rank)
///       all.push_back(at::empty_like(mine));
///     ddp::gather(mine, all);
Work gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs,
            const GatherOptions& options = {}, const ProcessGroup& group = {});

/// Rank r's `output` gets rank `src`'s inputs[r]; on the other ranks `inputs` is empty.
Work scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
             const ScatterOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp
