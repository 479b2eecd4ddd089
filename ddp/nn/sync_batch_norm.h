#pragma once

#include <cstdint>
#include <optional>
#include <ostream>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <ddp/process_group/process_group.h>

namespace ddp {

/// Options of `SyncBatchNorm`: names and defaults of `torch::nn::BatchNormOptions`, and a group.
class SyncBatchNormOptions {
 public:
  /* implicit */ SyncBatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}
  /// So that a member's type is all that changes in a program.
  /* implicit */ SyncBatchNormOptions(const torch::nn::BatchNormOptions& options)
      : num_features_(options.num_features()),
        eps_(options.eps()),
        momentum_(options.momentum()),
        affine_(options.affine()),
        track_running_stats_(options.track_running_stats()) {}

  /// The input's channels, C. No effect after construction.
  TORCH_ARG(std::int64_t, num_features);
  /// Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  /// The weight of the new batch in the running statistics; std::nullopt: all batches weigh alike.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Whether there are a weight and a bias for each channel. No effect after construction.
  TORCH_ARG(bool, affine) = true;
  /// Whether there are running statistics. No effect after construction.
  TORCH_ARG(bool, track_running_stats) = true;
  /// The ranks whose batches are one; empty: the default group.
  TORCH_ARG(ProcessGroup, process_group);
};

/// The tensors of a batch norm; undefined ones where its options say so.
struct BatchNormState {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;
};

/// The module behind the holder `SyncBatchNorm`.
class SyncBatchNormImpl final : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /* implicit */ SyncBatchNormImpl(const SyncBatchNormOptions& layer_options);
  /// A layer that shares the tensors of another one. For `convert_sync_batchnorm`.
  SyncBatchNormImpl(const SyncBatchNormOptions& layer_options, const BatchNormState& state);

  /// Input and output: N x C x any dimensions. In training mode a collective; see `SyncBatchNorm`.
  at::Tensor forward(const at::Tensor& input);

  /// As BatchNorm's: zero mean and unit variance; weights of 1 and biases of 0.
  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;

 private:
  void register_state(const BatchNormState& state);
  void check_input(const at::Tensor& input) const;
  ProcessGroup group_to_synchronize() const;
  at::Tensor forward_alone(const at::Tensor& input);
  at::Tensor forward_together(const at::Tensor& input, const ProcessGroup& group);
  bool updates_running_stats() const;
  double next_average_factor() const;
};

/// Batch normalisation over the batch of all ranks: as `torch::nn::BatchNorm1d`, `2d` and `3d` in a
/// single process that has the ranks' batches as one. Ranks may have batches of different sizes,
/// empty ones too. Python's torch.nn.SyncBatchNorm, on CPUs as well.
///
/// Parameters and buffers have BatchNorm's names, so that either loads the other's checkpoints.
///
/// Ranks communicate in training mode alone: one all-gather in forward (under `torch::NoGradGuard`
/// too), and one all-reduce in backward where any rank's input requires a gradient. All ranks of
/// the group run the layer, and its backward, in the same order. In evaluation mode, with one rank,
/// or without a default group, it is a plain batch norm of this rank's batch.
///
/// The gradients of weight and bias are this rank's own: DistributedDataParallel averages them.
/// Second derivatives are refused.
///
/// Input: float, double, half or bfloat16, of 2 or more dimensions; half types may go with float
/// parameters. Thread safety: as a module's, one thread trains; collectives on the same group must
/// not run in other threads meanwhile.
///
/// Errors: UsageError (an input that does not fit; fewer than two values a channel over all ranks,
/// and a graph recorded on some ranks only, both on every rank), CommunicationError (a rank left),
/// from `forward` and the loss's `backward()`.
///
///     struct NetImpl : torch::nn::Module {
///       torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(3, 16, 3));
///       ddp::SyncBatchNorm norm = register_module("norm", ddp::SyncBatchNorm(16));
TORCH_MODULE(SyncBatchNorm);

}  // namespace ddp
