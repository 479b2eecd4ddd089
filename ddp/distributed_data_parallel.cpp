#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <ddp/comm_hooks/default_hooks.h>
#include <ddp/distributed_data_parallel_base.h>
#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/model_agreement.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/group_registry.h>

namespace ddp {
namespace {

// Python's size of a coalesced broadcast (nn/parallel/distributed.py).
constexpr std::size_t kBroadcastBytes = std::size_t{250} << 20;

std::vector<NamedParameter> unique_entries(
    const torch::OrderedDict<std::string, at::Tensor>& entries) {
  std::vector<NamedParameter> unique;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : entries) {
    if (entry.value().defined() && seen.insert(entry.value().unsafeGetTensorImpl()).second) {
      unique.push_back({entry.key(), entry.value()});
    }
  }
  return unique;
}

/// Without those that stand in `ignored`. A tensor with several names is left out by any of them.
std::vector<NamedParameter> without(const torch::OrderedDict<std::string, at::Tensor>& entries,
                                    const std::vector<std::string>& ignored) {
  std::unordered_set<const c10::TensorImpl*> left_out;
  for (const auto& name : ignored) {
    if (const auto* tensor = entries.find(name)) {
      left_out.insert(tensor->unsafeGetTensorImpl());
    }
  }
  auto kept = unique_entries(entries);
  kept.erase(std::remove_if(kept.begin(), kept.end(),
                            [&](const auto& entry) {
                              return left_out.count(entry.tensor.unsafeGetTensorImpl()) != 0;
                            }),
             kept.end());
  return kept;
}

std::vector<NamedParameter> trainable(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> result;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(result),
               [](const auto& parameter) { return parameter.tensor.requires_grad(); });
  return result;
}

/// As a collective takes it: detached, and complex values as pairs of reals.
at::Tensor communicable(const at::Tensor& tensor) {
  const auto plain = tensor.detach();
  return plain.is_complex() ? at::view_as_real(plain) : plain;
}

std::size_t bytes_of(const char* name, double mebibytes) {
  if (!(mebibytes > 0)) {
    throw UsageError(
        fmt::format("DistributedDataParallel: {} is {} MiB; it must be positive", name, mebibytes));
  }
  return static_cast<std::size_t>(mebibytes * 1024 * 1024);
}

ReducerOptions reducer_options(const DistributedDataParallelOptions& options) {
  ReducerOptions result;
  if (options.bucket_cap_mb()) {
    result.bucket_cap = bytes_of("bucket_cap_mb", *options.bucket_cap_mb());
    result.first_bucket_cap =
        result.bucket_cap;  // as Python: a given cap holds for the first bucket too
  }
  if (options.first_bucket_cap_mb()) {
    result.first_bucket_cap = bytes_of("first_bucket_cap_mb", *options.first_bucket_cap_mb());
  }
  result.find_unused_parameters = options.find_unused_parameters();
  result.gradient_as_bucket_view = options.gradient_as_bucket_view();
  return result;
}

}  // namespace

NoSyncGuard::NoSyncGuard(std::shared_ptr<DistributedDataParallelBase> model)
    : model_(std::move(model)), previous_(model_->require_backward_grad_sync()) {
  model_->set_require_backward_grad_sync(false);
}

NoSyncGuard::~NoSyncGuard() { model_->set_require_backward_grad_sync(previous_); }

DistributedDataParallelBase::DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                                                         DistributedDataParallelOptions options)
    : options_(std::move(options)), wrapped_(std::move(module)) {
  if (!wrapped_) {
    throw UsageError("DistributedDataParallel: the module is empty");
  }
  register_module("module", wrapped_);
  group_ = detail::resolve_group(options_.process_group());
  const auto reducer_settings = reducer_options(options_);
  check_ignored_names();
  const auto parameters = trainable(managed_parameters());
  if (parameters.empty()) {
    throw UsageError(
        "DistributedDataParallel: no parameter of the module requires a gradient, so there is "
        "nothing to "
        "synchronise; use the module itself, or unfreeze a parameter before wrapping");
  }
  const auto channel = detail::channel_of(group_);
  const auto scope = fmt::format("model{}", channel->next_id());
  if (options_.init_sync()) {
    detail::check_models_agree(*channel, scope, parameters,
                               unique_entries(wrapped_->named_buffers()));
    try {
      if (!channel->all_are_members()) {
        // Python's ranks verify over the wire.
        std::vector<at::Tensor> tensors;
        for (const auto& parameter : parameters) {
          tensors.push_back(parameter.tensor);
        }
        c10d::verify_params_across_processes(group_, tensors, std::nullopt);
      }
      synchronize_module_states();
    } catch (const std::exception& error) {
      detail::fail_collective(*channel, "giving rank 0's parameters and buffers to all ranks",
                              detail::concise(error));
    }
  }
  reducer_ = Reducer::create(parameters, group_, channel, scope, reducer_settings);
}

std::vector<NamedParameter> DistributedDataParallelBase::managed_parameters() const {
  return without(wrapped_->named_parameters(), options_.ignored_parameters());
}

std::vector<NamedParameter> DistributedDataParallelBase::managed_buffers() const {
  return without(wrapped_->named_buffers(), options_.ignored_parameters());
}

void DistributedDataParallelBase::check_ignored_names() const {
  for (const auto& name : options_.ignored_parameters()) {
    if (!wrapped_->named_parameters().contains(name) && !wrapped_->named_buffers().contains(name)) {
      throw UsageError(
          fmt::format("DistributedDataParallel: ignored_parameters has \"{}\", but the module has "
                      "no parameter or buffer of that "
                      "name; names are those of the wrapped module's named_parameters() and "
                      "named_buffers(), as \"fc.weight\"",
                      name));
    }
  }
}

void DistributedDataParallelBase::synchronize_module_states() {
  std::vector<at::Tensor> tensors;
  for (const auto& entries : {managed_parameters(), managed_buffers()}) {
    for (const auto& entry : entries) {
      tensors.push_back(communicable(entry.tensor));
    }
  }
  c10d::broadcast_coalesced(group_, tensors, kBroadcastBytes);
}

void DistributedDataParallelBase::broadcast_buffers() {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : managed_buffers()) {
    tensors.push_back(communicable(entry.tensor));
  }
  if (tensors.empty()) {
    return;
  }
  try {
    c10d::broadcast_coalesced(group_, tensors, kBroadcastBytes);
  } catch (const std::exception& error) {
    detail::fail_collective(*detail::channel_of(group_), "the broadcast of the module's buffers",
                            detail::concise(error));
  }
}

void DistributedDataParallelBase::before_forward() {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  reducer_->prepare_for_forward();
  if (const auto passes = reducer_->finished_passes(); passes != passes_seen_) {
    passes_seen_ = passes;
    buffers_are_due_ = true;
  }
  // Once a step: the first forward's graph refers to the buffers, and a second broadcast before its
  // backward would change them under it.
  if (buffers_are_due_ && options_.broadcast_buffers()) {
    broadcast_buffers();
  }
  buffers_are_due_ = false;
  reducer_->set_synchronize(require_sync_);
}

std::vector<at::Tensor> DistributedDataParallelBase::parameters() const {
  std::vector<at::Tensor> tensors;
  for (auto& entry : unique_entries(Module::named_parameters())) {
    tensors.push_back(std::move(entry.tensor));
  }
  return tensors;
}

torch::OrderedDict<std::string, at::Tensor> DistributedDataParallelBase::named_parameters() const {
  torch::OrderedDict<std::string, at::Tensor> result;
  for (auto& entry : unique_entries(Module::named_parameters())) {
    result.insert(std::move(entry.name), std::move(entry.tensor));
  }
  return result;
}

NoSyncGuard DistributedDataParallelBase::no_sync() {
  return NoSyncGuard(std::dynamic_pointer_cast<DistributedDataParallelBase>(shared_from_this()));
}

void DistributedDataParallelBase::set_require_backward_grad_sync(bool require) {
  require_sync_ = require;
}

void DistributedDataParallelBase::register_comm_hook(CommHook hook) {
  reducer_->register_comm_hook(std::move(hook));
}

void DistributedDataParallelBase::register_comm_hook(
    std::shared_ptr<c10d::CommHookInterface> hook) {
  register_comm_hook(comm_hooks::from_native(std::move(hook)));
}

}  // namespace ddp
