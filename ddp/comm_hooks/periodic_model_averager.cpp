#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <ddp/comm_hooks/periodic_model_averager.h>
#include <ddp/error.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/process_group/reduce.h>

namespace ddp {
namespace {

/// For each parameter whether it has a gradient on any rank. Python's ranks do not ask each other,
/// so with one of them in the group every rank tells its own.
std::vector<std::int32_t> have_gradients(const std::vector<at::Tensor>& parameters,
                                         const ProcessGroup& group) {
  std::vector<std::int32_t> have;
  for (const auto& parameter : parameters) {
    have.push_back(parameter.grad().defined() ? 1 : 0);
  }
  if (have.empty() || !detail::channel_of(group)->all_are_members()) {
    return have;
  }
  const auto map = at::tensor(have, at::kInt).to(parameters.front().device());
  all_reduce(map, ReduceOp::MAX, group);
  const auto host = map.cpu();
  return {host.data_ptr<std::int32_t>(), host.data_ptr<std::int32_t>() + host.numel()};
}

}  // namespace

PeriodicModelAverager::PeriodicModelAverager(const PeriodicModelAveragerOptions& options)
    : period_(options.period()),
      warmup_steps_(options.warmup_steps()),
      group_(detail::resolve_group(options.process_group())) {
  if (period_ < 1) {
    throw UsageError(
        fmt::format("PeriodicModelAverager: period is {}; it must be at least 1", period_));
  }
  if (warmup_steps_ < 0) {
    throw UsageError(fmt::format(
        "PeriodicModelAverager: warmup_steps is {}; it must not be negative", warmup_steps_));
  }
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const auto step = step_++;
  if (step < warmup_steps_ || (step - warmup_steps_) % period_ != 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> trained;
  std::vector<at::Tensor> flat;
  const auto is_trained = have_gradients(parameters, group_);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (is_trained[i] != 0) {
      trained.push_back(parameters[i]);
      flat.push_back(parameters[i].reshape(-1));
    }
  }
  if (trained.empty()) {
    return;
  }
  const auto all = at::cat(flat);
  all.div_(group_->getSize());
  all_reduce(all, {}, group_);
  std::int64_t offset = 0;
  for (const auto& parameter : trained) {
    const auto part = all.narrow(0, offset, parameter.numel());
    const auto values = part.is_complex() && !parameter.is_complex() ? at::real(part) : part;
    parameter.copy_(values.reshape(parameter.sizes()));
    offset += parameter.numel();
  }
}

}  // namespace ddp
