#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {

/// Options of `GradScaler`, with the names and defaults of Python's `torch.amp.GradScaler`.
class GradScalerOptions {
 public:
  TORCH_ARG(double, init_scale) = 65536.0;
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Steps in a row without an overflow after which the scale grows.
  TORCH_ARG(std::int64_t, growth_interval) = 2000;
  /// False: losses are left as they are, and `step` is the optimizer's.
  TORCH_ARG(bool, enabled) = true;
};

/// Keeps the small gradients of a float16 forward from vanishing: the loss is multiplied by a
/// scale, the gradients are divided by it before the optimizer's step, and a step in which one is
/// infinite or not a number is left out, and the scale made smaller. Python's
/// `torch.amp.GradScaler`, which LibTorch lacks, with its arithmetic.
///
/// With DistributedDataParallel nothing else is needed: gradients are averaged before they are
/// looked at, so all ranks find the same and step alike.
///
///     ddp::GradScaler scaler;
///     {
///       at::autocast::set_autocast_enabled(at::kCUDA, true);
///       loss = ...;
///       at::autocast::set_autocast_enabled(at::kCUDA, false);
///       at::autocast::clear_cache();
///     }
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// One optimizer. Not thread-safe.
class GradScaler {
 public:
  /// Throws UsageError for a factor or interval that is out of range.
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss times the scale.
  at::Tensor scale(const at::Tensor& loss);
  /// Divides the optimizer's gradients by the scale now, so that the program may clip them before
  /// `step`. Throws UsageError the second time in one step, for a gradient of float16, and where
  /// `scale` was never called.
  void unscale(torch::optim::Optimizer& optimizer);
  /// The optimizer's step, unless a gradient is infinite or not a number; unscales before it, where
  /// the program has not. Waits for the device. Returns whether the step was made. Throws
  /// UsageError the second time before `update`, and for a gradient of float16.
  bool step(torch::optim::Optimizer& optimizer);
  /// Adapts the scale. After each `step`.
  void update();

  /// The scale in force.
  double get_scale() const;
  void set_scale(double scale);

 private:
  const GradScalerOptions options_;
  at::Tensor scale_;                   // a float on the loss's device; undefined before the first
  at::Tensor growth_tracker_;          // steps since the scale changed
  std::vector<at::Tensor> found_inf_;  // by device; empty where nothing was unscaled
  double initial_scale_;
  bool has_stepped_ = false;  // since the last update
};

}  // namespace ddp
