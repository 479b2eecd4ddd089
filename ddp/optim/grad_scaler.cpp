#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <ddp/error.h>
#include <ddp/optim/grad_scaler.h>

namespace ddp {
namespace {

void require(bool holds, const std::string& what, double value) {
  if (!holds) {
    throw UsageError(fmt::format("GradScaler: {}; found {}", what, value));
  }
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : options_(options), initial_scale_(options_.init_scale()) {
  require(options_.init_scale() > 0, "init_scale must be positive", options_.init_scale());
  require(options_.growth_factor() > 1, "growth_factor must be above 1", options_.growth_factor());
  require(options_.backoff_factor() > 0 && options_.backoff_factor() < 1,
          "backoff_factor must be between 0 and 1", options_.backoff_factor());
  require(options_.growth_interval() > 0, "growth_interval must be positive",
          static_cast<double>(options_.growth_interval()));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled()) {
    return loss;
  }
  if (!scale_.defined()) {
    const auto options = at::TensorOptions(loss.device());
    scale_ = at::full({}, initial_scale_, options.dtype(at::kFloat));
    growth_tracker_ = at::zeros({}, options.dtype(at::kInt));
  }
  return loss * scale_.to(loss.device(), /*non_blocking=*/true);
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled()) {
    return;
  }
  if (!scale_.defined()) {
    throw UsageError(
        "GradScaler: unscale or step before scale: the gradients are those of "
        "scaler.scale(loss).backward()");
  }
  if (!found_inf_.empty()) {
    throw UsageError(
        "GradScaler: the gradients are unscaled already: call update() once after each step()");
  }
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> gradients;
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (gradient.defined()) {
        if (gradient.scalar_type() == at::kHalf) {
          throw UsageError(
              "GradScaler: a gradient is of float16: keep the parameters in float32, and let "
              "autocast compute in float16");
        }
        if (gradient.is_sparse()) {
          gradient = gradient.coalesce();  // its values may be added up only now
        }
        gradients[{gradient.device().str(), gradient.scalar_type()}].push_back(
            gradient.is_sparse() ? gradient._values() : gradient);
      }
    }
  }
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  for (auto& [key, tensors] : gradients) {
    const auto device = tensors.front().device();
    auto found = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse.to(device));
    found_inf_.push_back(std::move(found));
  }
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (has_stepped_) {
    throw UsageError(
        "GradScaler: step was called a second time: call update() after each step(), and take a "
        "scaler for each optimizer");
  }
  if (options_.enabled() && found_inf_.empty()) {
    unscale(optimizer);
  }
  has_stepped_ = options_.enabled();
  float found = 0;
  for (const auto& one : found_inf_) {
    found += one.item<float>();
  }
  if (found == 0) {
    optimizer.step();
  }
  return found == 0;
}

void GradScaler::update() {
  has_stepped_ = false;
  if (!options_.enabled() || found_inf_.empty()) {
    return;
  }
  auto found = at::zeros({}, scale_.options());
  for (const auto& one : found_inf_) {
    found += one.to(scale_.device(), /*non_blocking=*/true);
  }
  at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor(),
                         options_.backoff_factor(), options_.growth_interval());
  found_inf_.clear();
}

double GradScaler::get_scale() const {
  if (!options_.enabled()) {
    return 1;
  }
  return scale_.defined() ? scale_.item<double>() : initial_scale_;
}

void GradScaler::set_scale(double scale) {
  require(scale > 0, "the scale must be positive", scale);
  initial_scale_ = scale;
  if (scale_.defined()) {
    scale_.fill_(scale);
  }
}

}  // namespace ddp
