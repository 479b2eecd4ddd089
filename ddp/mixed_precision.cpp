#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/mixed_precision.h>

namespace ddp::detail {

LoweredParameters::LoweredParameters(const std::vector<at::Tensor>& parameters,
                                     at::ScalarType dtype)
    : dtype_(dtype) {
  for (const auto& parameter : parameters) {
    if (parameter.is_floating_point() && parameter.scalar_type() != dtype) {
      parameters_.push_back(parameter);
    }
  }
}

void LoweredParameters::lower(bool until_backward) {
  awaits_backward_ = awaits_backward_ || until_backward;
  if (is_lowered_) {
    return;
  }
  values_.clear();
  for (auto& parameter : parameters_) {
    values_.push_back(parameter.detach());
    parameter.set_data(values_.back().to(dtype_));
  }
  is_lowered_ = true;
}

void LoweredParameters::restore() {
  awaits_backward_ = false;
  if (!is_lowered_) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    parameter.set_data(values_[i]);
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined() && gradient.scalar_type() != values_[i].scalar_type()) {
      gradient = gradient.to(values_[i].scalar_type());
    }
  }
  values_.clear();
  is_lowered_ = false;
}

}  // namespace ddp::detail
