#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/nn/batch_statistics.h>
#include <ddp/nn/sync_batch_norm.h>
#include <ddp/nn/synchronized_normalization.h>
#include <ddp/process_group/group_registry.h>

namespace ddp {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  const auto who = is_initialized() ? fmt::format("rank {}: ", get_rank()) : std::string();
  throw UsageError(fmt::format("{}SyncBatchNorm: {}", who, why));
}

bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const SyncBatchNormOptions& layer_options)
    : options(layer_options) {
  SyncBatchNormImpl::reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const SyncBatchNormOptions& layer_options,
                                     const BatchNormState& state)
    : options(layer_options) {
  register_state(state);
}

void SyncBatchNormImpl::register_state(const BatchNormState& state) {
  // The names and their order are BatchNorm's, undefined tensors included.
  weight = register_parameter("weight", state.weight, requires_grad(state.weight));
  bias = register_parameter("bias", state.bias, requires_grad(state.bias));
  running_mean = register_buffer("running_mean", state.running_mean);
  running_var = register_buffer("running_var", state.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", state.num_batches_tracked);
}

void SyncBatchNormImpl::reset() {
  BatchNormState state;
  if (options.affine()) {
    state.weight = at::ones({options.num_features()}).set_requires_grad(true);
    state.bias = at::zeros({options.num_features()}).set_requires_grad(true);
  }
  if (options.track_running_stats()) {
    state.running_mean = at::zeros({options.num_features()});
    state.running_var = at::ones({options.num_features()});
    state.num_batches_tracked = at::zeros({}, at::kLong);
  }
  register_state(state);
}

void SyncBatchNormImpl::reset_running_stats() {
  if (options.track_running_stats()) {
    running_mean.zero_();
    running_var.fill_(1);
    num_batches_tracked.zero_();
  }
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (options.affine()) {
    const at::NoGradGuard no_grad;
    weight.fill_(1);
    bias.zero_();
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  check_input(input);
  const auto group = group_to_synchronize();
  return group ? forward_together(input.contiguous(input.suggest_memory_format()), group)
               : forward_alone(input);
}

void SyncBatchNormImpl::check_input(const at::Tensor& input) const {
  if (!input.defined()) {
    refuse("the input is undefined; give it a tensor N x C x ...");
  }
  if (input.dim() < 2 || input.size(1) != options.num_features() || input.size(1) == 0) {
    refuse(fmt::format(
        "the input is [{}]; expected N x {} x any dimensions, with the {} of num_features, which "
        "must be 1 or more; give the layer's options the input's number of channels",
        fmt::join(input.sizes(), ", "), options.num_features(), options.num_features()));
  }
  if (!input.is_floating_point()) {
    refuse(fmt::format("the input is of dtype {}; convert it to float, double, half or bfloat16",
                       c10::toString(input.scalar_type())));
  }
}

/// Empty: this rank's batch is alone.
ProcessGroup SyncBatchNormImpl::group_to_synchronize() const {
  if (!is_training() || (!options.process_group() && !is_initialized())) {
    return {};
  }
  auto group = detail::resolve_group(options.process_group());
  return group->getSize() > 1 ? group : ProcessGroup();
}

bool SyncBatchNormImpl::updates_running_stats() const {
  return is_training() && options.track_running_stats() && running_mean.defined();
}

/// The new batch's weight in the running statistics.
double SyncBatchNormImpl::next_average_factor() const {
  return options.momentum() ? *options.momentum() : 1.0 / (num_batches_tracked.item<double>() + 1);
}

at::Tensor SyncBatchNormImpl::forward_alone(const at::Tensor& input) {
  const bool batch_statistics = is_training() || !running_mean.defined();
  if (batch_statistics && input.numel() == input.size(1)) {
    refuse(fmt::format(
        "Expected more than 1 value per channel when training, got input size [{}]; give a larger "
        "batch, or call model->eval()",
        fmt::join(input.sizes(), ", ")));
  }
  const bool updates = updates_running_stats();
  const bool uses = !is_training() || updates;
  const double factor = updates ? next_average_factor() : 0;
  auto output = at::batch_norm(input, weight, bias, uses ? running_mean : at::Tensor(),
                               uses ? running_var : at::Tensor(), batch_statistics, factor,
                               options.eps(), at::globalContext().userEnabledCuDNN());
  if (updates) {
    const at::NoGradGuard no_grad;
    num_batches_tracked.add_(1);
  }
  return output;
}

at::Tensor SyncBatchNormImpl::forward_together(const at::Tensor& input, const ProcessGroup& group) {
  auto part = detail::BackwardPart::kNone;
  if (at::GradMode::is_enabled()) {
    if (requires_grad(input)) {
      part = detail::BackwardPart::kInput;
    } else if (requires_grad(weight) || requires_grad(bias)) {
      part = detail::BackwardPart::kParameters;
    }
  }
  const auto statistics = detail::gather_batch_statistics(input, part, group);
  if (updates_running_stats()) {
    const at::NoGradGuard no_grad;
    const double factor = next_average_factor();
    const auto update = [&](const at::Tensor& running, const at::Tensor& now) {
      running.copy_(running.to(now.scalar_type()).mul(1 - factor).add_(now, factor));
    };
    update(running_mean, statistics.mean);
    update(running_var, statistics.variance * (statistics.count / (statistics.count - 1)));
    num_batches_tracked.add_(1);
  }
  return detail::normalize_synchronized(input, weight, bias, statistics, options.eps(), group);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "ddp::SyncBatchNorm({}, eps={}, momentum={}, affine={}, "
      "track_running_stats={})",
      options.num_features(), options.eps(),
      options.momentum() ? fmt::format("{}", *options.momentum()) : "None", options.affine(),
      options.track_running_stats());
}

}  // namespace ddp
