#include <algorithm>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <ddp/comm_hooks/default_hooks.h>
#include <ddp/distributed_data_parallel_base.h>
#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/model_agreement.h>
#include <ddp/module_broadcast.h>
#include <ddp/module_devices.h>
#include <ddp/nn/sync_batch_norm.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/process_group/nccl/open_plugin.h>
#include <ddp/reducer/reducer.h>
#include <ddp/sparse_parameters.h>

namespace ddp {
namespace {

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

/// "" where the group has none.
std::string backend_for_cuda(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CUDA)->getBackendName();
  } catch (const std::exception&) {
    return "";
  }
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
  result.static_graph = options.static_graph();
  result.python_compatible = options.python_compatible();
  if (options.mixed_precision()) {
    result.lowered_dtype = options.mixed_precision()->param_dtype();
  }
  result.gradient_as_bucket_view = options.gradient_as_bucket_view();
  result.is_capturing = [] { return detail::is_capturing_graph(); };
  return result;
}

std::string text_of(const std::optional<MixedPrecision>& precision) {
  if (!precision) {
    return "";
  }
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "own";
  };
  return fmt::format(", param_dtype={}, reduce_dtype={}, buffer_dtype={}",
                     name(precision->param_dtype()), name(precision->reduce_dtype()),
                     name(precision->buffer_dtype()));
}

/// Those that must be alike on all ranks, as one line of text.
std::string text_of(const DistributedDataParallelOptions& options) {
  const auto megabytes = [](const std::optional<double>& cap) {
    return cap ? fmt::format("{}", *cap) : std::string("default");
  };
  return fmt::format(
      "broadcast_buffers={}, init_sync={}, bucket_cap_mb={}, first_bucket_cap_mb={}, "
      "find_unused_parameters={}, static_graph={}, python_compatible={}{}",
      options.broadcast_buffers(), options.init_sync(), megabytes(options.bucket_cap_mb()),
      megabytes(options.first_bucket_cap_mb()), options.find_unused_parameters(),
      options.static_graph(), options.python_compatible(), text_of(options.mixed_precision()));
}

/// Of the module itself. Its public functions copy the whole dictionary.
std::size_t count_parameters(const torch::nn::Module& module) {
  struct Access : torch::nn::Module {
    static std::size_t count(const Module& module) {
      return (module.*(&Access::parameters_)).size();
    }
  };
  return Access::count(module);
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
  group_ = detail::resolve_group(options_.process_group());
  if (!wrapped_) {
    throw UsageError(who() + "DistributedDataParallel: the module is empty");
  }
  register_module("module", wrapped_);
  const auto reducer_settings = reducer_options(options_);
  check_ignored_names();
  check_mixed_precision();
  const auto managed = managed_parameters();
  auto parameters = trainable(managed);
  if (parameters.empty()) {
    throw UsageError(
        who() +
        "DistributedDataParallel: no parameter of the module requires a gradient, so there is "
        "nothing to synchronise; use the module itself, or unfreeze a parameter before wrapping");
  }
  detail::check_backend_fits(managed, backend_for_cuda(*group_),
                             who() + "DistributedDataParallel: ");
  input_place_.device =
      detail::find_input_device(managed, options_.device_ids(), options_.output_device(),
                                who() + "DistributedDataParallel: ");
  detail::mark_sparse_parameters(*wrapped_, parameters);
  const auto channel = detail::channel_of(group_);
  check_ranks_are_native();
  const auto scope = fmt::format("model{}", channel->next_id());
  detail::check_models_agree(*channel, scope, text_of(options_), managed, managed_buffers());
  if (options_.init_sync()) {
    try {
      if (!channel->all_are_members()) {
        // Python's ranks verify over the wire.
        std::vector<at::Tensor> tensors;
        for (const auto& parameter : parameters) {
          tensors.push_back(parameter.tensor);
        }
        c10d::verify_params_across_processes(group_, tensors, std::nullopt);
      }
      synchronize_module_states(0);
    } catch (const std::exception& error) {
      detail::fail_collective(*channel, "giving rank 0's parameters and buffers to all ranks",
                              detail::concise(error));
    }
  }
  reducer_ = Reducer::create(parameters, group_, channel, scope, reducer_settings);
  remember_model(managed);
  set_up_mixed_precision(managed);
}

void DistributedDataParallelBase::set_up_mixed_precision(
    const std::vector<NamedParameter>& parameters) {
  if (!options_.mixed_precision()) {
    return;
  }
  const auto& precision = *options_.mixed_precision();
  if (precision.param_dtype()) {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : parameters) {
      tensors.push_back(parameter.tensor);
    }
    input_place_.dtype = precision.param_dtype();
    lowered_ = std::make_shared<detail::LoweredParameters>(tensors, *precision.param_dtype());
    reducer_->set_after_backward([lowered = lowered_] { lowered->restore(); });
  }
  if (const auto dtype =
          precision.reduce_dtype() ? precision.reduce_dtype() : precision.param_dtype()) {
    if (*dtype == at::kHalf) {
      register_comm_hook(comm_hooks::fp16_compress(group_));
    } else if (*dtype == at::kBFloat16) {
      register_comm_hook(comm_hooks::bf16_compress(group_));
    }
  }
  if (precision.buffer_dtype()) {
    for (auto& buffer : managed_buffers()) {
      if (buffer.tensor.is_floating_point()) {
        buffer.tensor.set_data(buffer.tensor.to(*precision.buffer_dtype()));
      }
    }
  }
}

void DistributedDataParallelBase::check_mixed_precision() const {
  if (!options_.mixed_precision()) {
    return;
  }
  const auto& precision = *options_.mixed_precision();
  const auto check = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype && !c10::isFloatingType(*dtype)) {
      throw UsageError(fmt::format(
          "{}DistributedDataParallel: mixed_precision: {} is {}; expected a floating dtype, as "
          "torch::kBFloat16",
          who(), name, c10::toString(*dtype)));
    }
  };
  check("param_dtype", precision.param_dtype());
  check("reduce_dtype", precision.reduce_dtype());
  check("buffer_dtype", precision.buffer_dtype());
}

std::string DistributedDataParallelBase::who() const {
  return fmt::format("rank {} of {}: ", group_->getRank(), group_->getSize());
}

void DistributedDataParallelBase::remember_model(const std::vector<NamedParameter>& parameters) {
  for (const auto& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) {
      frozen_.push_back(parameter);
    }
  }
  for (const auto& entry : wrapped_->named_parameters()) {
    known_.insert(entry.value().unsafeGetTensorImpl());
  }
  for (auto& module : wrapped_->modules()) {
    Part part;
    for (const auto& child : module->children()) {
      part.children.push_back(child.get());
    }
    part.parameters = count_parameters(*module);
    part.module = std::move(module);
    parts_.push_back(std::move(part));
  }
}

void DistributedDataParallelBase::check_model_unchanged() const {
  for (const auto& parameter : frozen_) {
    if (parameter.tensor.requires_grad()) {
      throw UsageError(fmt::format(
          "{}the parameter {} was frozen when the model was wrapped and requires a gradient now, "
          "which would not be averaged: wrap the model again after unfreezing (and give the new "
          "wrapper's parameters to the optimizer)",
          who(), parameter.name));
    }
  }
  const bool unchanged = std::all_of(parts_.begin(), parts_.end(), [](const Part& part) {
    const auto children = part.module->children();
    return count_parameters(*part.module) == part.parameters &&
           std::equal(children.begin(), children.end(), part.children.begin(), part.children.end(),
                      [](const auto& child, const auto* known) { return child.get() == known; });
  });
  if (unchanged) {
    return;
  }
  for (const auto& entry : wrapped_->named_parameters()) {
    if (entry.value().requires_grad() && known_.count(entry.value().unsafeGetTensorImpl()) == 0) {
      throw UsageError(fmt::format(
          "{}the parameter {} was registered after the model had been wrapped, so that its "
          "gradient would not be averaged: register everything first, or wrap the model again",
          who(), entry.key()));
    }
  }
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

void DistributedDataParallelBase::check_ranks_are_native() const {
  const auto channel = detail::channel_of(group_);
  if (options_.python_compatible() || channel->all_are_members()) {
    return;
  }
  const auto& members = channel->members();
  std::vector<int> others;
  for (int rank = 0; rank < channel->world_size(); ++rank) {
    if (std::find(members.begin(), members.end(), rank) == members.end()) {
      others.push_back(rank);
    }
  }
  throw UsageError(fmt::format(
      "{}DistributedDataParallel: rank{} {} of the group {} not from this library: with Python's "
      "DistributedDataParallel there, wrap with "
      "DistributedDataParallelOptions().python_compatible(true) here",
      who(), others.size() == 1 ? "" : "s", fmt::join(others, ", "),
      others.size() == 1 ? "is" : "are"));
}

void DistributedDataParallelBase::synchronize_module_states(int root) {
  std::vector<at::Tensor> tensors;
  for (const auto& entries : {managed_parameters(), managed_buffers()}) {
    for (const auto& entry : entries) {
      tensors.push_back(communicable(entry.tensor));
    }
  }
  detail::broadcast_tensors(*group_, detail::channel_of(group_).get(), tensors, root);
}

void DistributedDataParallelBase::broadcast_buffers(int root) {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : managed_buffers()) {
    tensors.push_back(communicable(entry.tensor));
  }
  if (tensors.empty()) {
    return;
  }
  const auto channel = detail::channel_of(group_);
  try {
    detail::broadcast_tensors(*group_, channel.get(), tensors, root);
  } catch (const std::exception& error) {
    detail::fail_collective(*channel, "the broadcast of the module's buffers",
                            detail::concise(error));
  }
}

// Note [When buffers are broadcast]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Once a step, before its first forward: that forward's graph refers to the buffers, and another
// broadcast before its backward would change them under it. Python broadcasts before every forward
// whose predecessor recorded a graph to be reduced, under no_grad() too
// (nn/parallel/distributed.py, _pre_forward and _post_forward); with python_compatible that is done
// here as well.

void DistributedDataParallelBase::before_forward() {
  const bool records = at::GradMode::is_enabled();
  if (lowered_) {
    lowered_->lower(/*until_backward=*/records);
  }
  if (options_.python_compatible()) {
    if (records) {
      reducer_->prepare_for_forward();
      check_model_unchanged();
      reducer_->set_synchronize(require_sync_);
    }
    if (buffers_are_due_ && options_.broadcast_buffers()) {
      broadcast_buffers(0);
    }
    return;
  }
  if (!records || reducer_->is_in_backward()) {
    return;
  }
  if (const auto passes = reducer_->finished_passes(); passes != passes_seen_) {
    passes_seen_ = passes;
    buffers_are_due_ = true;
  }
  prepare_forward(buffers_are_due_);
  buffers_are_due_ = false;
  reducer_->set_synchronize(require_sync_);
}

void DistributedDataParallelBase::prepare_forward(bool is_new_step) {
  const bool broadcasts = is_new_step && options_.broadcast_buffers() && !managed_buffers().empty();
  if (join_ && (broadcasts || reducer_->rebuild_is_due())) {
    join_->announce(broadcasts ? detail::JoinWord::kBuffers : detail::JoinWord::kForward);
  }
  reducer_->prepare_for_forward();
  if (is_new_step) {
    check_model_unchanged();
  }
  if (broadcasts) {
    broadcast_buffers(join_ ? join_->last_active() : 0);
  }
}

void DistributedDataParallelBase::after_forward(bool returned) {
  const bool records = at::GradMode::is_enabled();
  if (lowered_ && !lowered_->awaits_backward()) {
    lowered_->restore();
  }
  if (options_.python_compatible() && returned) {
    buffers_are_due_ = records && require_sync_;
  }
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

LoggingData DistributedDataParallelBase::logging_data() const {
  LoggingData data;
  data.world_size = group_->getSize();
  data.rank = group_->getRank();
  data.backend_name = get_backend(group_);
  data.module_name = wrapped_->name();
  std::set<std::string> dtypes;
  for (const auto& parameter : managed_parameters()) {
    dtypes.insert(c10::toString(parameter.tensor.scalar_type()));
    if (parameter.tensor.requires_grad()) {
      ++data.num_parameter_tensors;
      data.total_parameter_size_bytes += static_cast<std::int64_t>(parameter.tensor.nbytes());
    }
  }
  data.dtypes = fmt::format("{}", fmt::join(dtypes, ", "));
  for (const auto& module : wrapped_->modules()) {
    data.has_sync_bn = data.has_sync_bn || module->as<SyncBatchNormImpl>() != nullptr;
  }
  for (const auto& device : options_.device_ids()) {
    data.device_ids += (data.device_ids.empty() ? "" : ", ") + device.str();
  }
  data.output_device = options_.output_device() ? options_.output_device()->str() : "";
  data.broadcast_buffers = options_.broadcast_buffers();
  data.join_uneven_inputs = join_ != nullptr;
  reducer_->describe_in(data);
  return data;
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
