#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/work.h>

// Collectives in which every rank has something for every other;
// <ddp/process_group/collectives.h> says what is common.

namespace ddp {

/// Options of `all_to_all`.
class AllToAllOptions {
 public:
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `all_to_all_single`.
class AllToAllSingleOptions {
 public:
  /// How many rows (of dimension 0) come from each rank, and go to each; empty: equal parts.
  TORCH_ARG(std::vector<std::int64_t>, output_split_sizes);
  TORCH_ARG(std::vector<std::int64_t>, input_split_sizes);
  TORCH_ARG(bool, async_op) = false;
};

/// Rank r's outputs[s] gets rank s's inputs[r]. The lists have a contiguous tensor for each rank,
/// of one dtype; the two tensors of a pair have the same size, which may be zero. Gloo has no such
/// collective on lists: they are copied into one buffer and back.
Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const AllToAllOptions& options = {}, const ProcessGroup& group = {});

/// The same with the lists in one tensor each, as blocks of rows.
///
///     ddp::all_to_all_single(output, input);     // 4 rows on 2 ranks: 2 stay, 2 go
///     ddp::all_to_all_single(output, input,
///         ddp::AllToAllSingleOptions().input_split_sizes({1, 3}).output_split_sizes({1, 2}));
Work all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp
