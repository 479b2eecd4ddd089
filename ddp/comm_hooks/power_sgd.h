#pragma once

#include <cstdint>

#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/reducer/comm_hook.h>

// PowerSGD: gradients travel as products of thin matrices. Vogels, Karimireddy, Jaggi: PowerSGD,
// practical low-rank gradient compression for distributed optimization, NeurIPS 2019,
// https://arxiv.org/abs/1905.13727. The arithmetic and the random start are those of Python's
// torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.

namespace ddp::comm_hooks {

/// Options of `power_sgd` and `batched_power_sgd`, the same on all ranks.
class PowerSGDOptions {
 public:
  /// The number of columns of the thin matrices: the higher, the better the approximation, and the
  /// more bytes and computation. Usually 1 to 4.
  TORCH_ARG(std::int64_t, matrix_approximation_rank) = 1;
  /// The step (counted in reduced passes) from which gradients are compressed; before it they are
  /// all-reduced whole. Training is most sensitive at its begin; a tenth of all steps is a good
  /// choice. At least 2 with `use_error_feedback` or `warm_start`, since the first step has other
  /// buckets than the later ones.
  TORCH_ARG(std::int64_t, start_power_sgd_iter) = 1000;
  /// A gradient of n x m elements is compressed only where that divides its size by more than this:
  /// (n + m) * rank * min_compression_rate < n * m. (`power_sgd` alone.)
  TORCH_ARG(double, min_compression_rate) = 2;
  /// What compression lost in this step is added to the next step's gradients. Costs memory of the
  /// size of the gradients.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// The approximation begins with the last step's. Costs memory of the size of the thin matrices.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to the norm that columns are divided by.
  TORCH_ARG(double, orthogonalization_epsilon) = 0;
  /// Of the random start, from 0 to 2^32 - 1. The program's own generators are not touched.
  TORCH_ARG(std::int64_t, random_seed) = 0;
  /// Gradients of the same shape within a bucket are multiplied as one batch. (`power_sgd` alone.)
  TORCH_ARG(bool, batch_tensors_with_same_shape) = false;
};

/// Compresses each gradient of a bucket that is worth it as a matrix of its first dimension by the
/// others; the rest, and complex buckets, are all-reduced whole.
///
/// For one model: its state (errors, thin matrices, the step) belongs to the hook and its copies.
/// `group` is the model's; empty: the default group. From `start_power_sgd_iter` on a thread of the
/// hook runs the all-reduces of each bucket beside backward. A model that communicates in its own
/// backward over Gloo (a synchronised batch norm) needs a group for the hook alone:
/// `power_sgd(options, ddp::new_group({}))`.
///
/// Throws UsageError where an option is out of range or this rank is not in the group.
///
///     model->register_comm_hook(ddp::comm_hooks::power_sgd(
///         ddp::comm_hooks::PowerSGDOptions().matrix_approximation_rank(2).start_power_sgd_iter(500)));
CommHook power_sgd(const PowerSGDOptions& options = {}, const ProcessGroup& group = {});

/// The same with the whole bucket as one square matrix: faster and less exact, so for rank 1.
CommHook batched_power_sgd(const PowerSGDOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp::comm_hooks
