#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/reducer/reducer.h>
#include <ddp/reducer/watched_wait.h>

namespace ddp {

std::shared_ptr<Reducer> Reducer::create(std::vector<NamedParameter> parameters,
                                         c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                         std::shared_ptr<FailureChannel> channel, std::string scope,
                                         const ReducerOptions& options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), std::move(process_group),
                                               std::move(channel), std::move(scope), options));
  for (const auto& parameter : reducer->parameters_) {
    const auto& tensor = parameter.tensor;
    reducer->hooks_.push_back(
        {{}, 0, at::TensorOptions(tensor.device()).dtype(tensor.dtype()), tensor.sizes().vec()});
    reducer->install_hook(reducer->hooks_.size() - 1);
  }
  return reducer;
}

Reducer::Reducer(std::vector<NamedParameter> parameters,
                 c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                 std::shared_ptr<FailureChannel> channel, std::string scope,
                 const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      process_group_(std::move(process_group)),
      channel_(std::move(channel)),
      scope_(std::move(scope)),
      options_(options),
      message_allocator_(detail::message_allocator(process_group_)),
      firings_(parameters_.size(), 0),
      ready_(parameters_.size(), 0),
      used_(parameters_.size(), 0) {
  set_buckets(first_assignment());
  first_bucket_sizes_ = bucket_sizes();
}

Reducer::~Reducer() {
  for (const auto& hook : hooks_) {
    hook.accumulator->del_post_hook(hook.key);
  }
}

void Reducer::install_hook(std::size_t index) {
  auto& hook = hooks_[index];
  // The accumulator lives as long as somebody holds it: the hook would vanish with it.
  hook.accumulator = torch::autograd::impl::grad_accumulator(parameters_[index].tensor);
  using torch::autograd::utils::LambdaPostHook;
  hook.key = hook.accumulator->add_post_hook(
      std::make_unique<LambdaPostHook>([this, index](const torch::autograd::variable_list& outputs,
                                                     const torch::autograd::variable_list& inputs) {
        on_gradient(index, !inputs.empty() && inputs.front().defined());
        return outputs;
      }));
}

/// A tensor whose data is replaced (`torch::load` into a wrapped model, `module->to(...)`) may get
/// another accumulator, on which nobody waits: its gradients would stay local without a word.
void Reducer::follow_parameters() {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const auto& name = parameters_[index].name;
    const auto& tensor = parameters_[index].tensor;
    auto& hook = hooks_[index];
    const auto dtype = c10::typeMetaToScalarType(hook.options.dtype());
    const bool is_lowered = c10::isFloatingType(dtype) && options_.lowered_dtype &&
                            tensor.scalar_type() == *options_.lowered_dtype;
    if ((tensor.scalar_type() != dtype && !is_lowered) ||
        tensor.device() != hook.options.device() || tensor.sizes() != hook.sizes) {
      throw UsageError(fmt::format(
          "{}the parameter {} was {} of shape [{}] on {} when the model was wrapped and is {} of "
          "shape [{}] on {} now: change dtype, device and shapes before wrapping, or wrap the "
          "model again",
          who(), name, c10::toString(dtype), fmt::join(hook.sizes, ", "),
          hook.options.device().str(), c10::toString(tensor.scalar_type()),
          fmt::join(tensor.sizes(), ", "), tensor.device().str()));
    }
    // Null for a parameter that is frozen now.
    const auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
    if (accumulator && accumulator != hook.accumulator) {
      hook.accumulator->del_post_hook(hook.key);
      install_hook(index);
    }
  }
}

void Reducer::set_synchronize(bool synchronize) {
  const std::lock_guard lock(mutex_);
  synchronize_ = synchronize;
}

void Reducer::set_before_pass(std::function<int()> announce) {
  const std::lock_guard lock(mutex_);
  before_pass_ = std::move(announce);
}

void Reducer::set_after_backward(std::function<void()> act) {
  const std::lock_guard lock(mutex_);
  after_backward_ = std::move(act);
}

void Reducer::register_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  if (!hook) {
    throw UsageError(who() + "register_comm_hook: the communication hook is empty");
  }
  if (hook_) {
    throw UsageError(
        who() + "register_comm_hook: a communication hook is registered already; there can be one");
  }
  if (open_) {
    throw UsageError(
        who() + "register_comm_hook: a backward pass is under way; register the hook before it");
  }
  hook_ = std::move(hook);
}

std::string Reducer::who() const {
  return fmt::format("rank {} of {}: ", process_group_->getRank(), process_group_->getSize());
}

void Reducer::prepare_for_forward() {
  const std::lock_guard lock(mutex_);
  if (failure_.empty() && channel_ && !channel_->failure().empty()) {
    failure_ =
        "the process group failed earlier; destroy it with ddp::destroy_process_group(). It failed "
        "with: " +
        channel_->failure();
  }
  if (!failure_.empty()) {
    throw CommunicationError(who() + failure_);
  }
  if (open_) {
    const auto report = fmt::format(
        "{}forward was called while a backward pass is under way: one thread runs forward and "
        "backward in turn",
        who());
    fail_pass(report);
    throw UsageError(report);
  }
  check_device_works();
  follow_parameters();
  if (!rebuilt_ && !finds_unused()) {
    refuse_capture("rank 0's order of the gradients");
  }
  if (rebuild_due()) {
    rebuild_buckets();
  }
  is_armed_ = true;
  forward_begin_ = Clock::now();
}

void Reducer::describe_in(LoggingData& data) const {
  const std::lock_guard lock(mutex_);
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  data.static_graph = options_.static_graph;
  data.bucket_cap_bytes = options_.bucket_cap;
  data.has_comm_hook = static_cast<bool>(hook_);
  data.bucket_sizes = first_bucket_sizes_;
  data.has_rebuilt_buckets = rebuilt_;
  if (rebuilt_) {
    data.rebuilt_bucket_sizes = bucket_sizes();
    for (const auto& bucket : buckets_) {
      data.rebuilt_per_bucket_param_indices.push_back(bucket.indices());
    }
  }
  data.iteration = finished_passes_;
  data.unused_parameter_size = unused_bytes_;
  data.num_buckets_reduced = finished_passes_ > 0 ? buckets_.size() : 0;
  data.last = last_times_;
  if (data.iteration > 0) {
    const auto count = static_cast<std::int64_t>(data.iteration);
    data.average = {all_times_.forward_compute / count, all_times_.backward_compute / count,
                    all_times_.backward_comm / count,
                    all_times_.backward_compute_comm_overlap / count};
  }
  data.error = failure_;
}

std::vector<std::int64_t> Reducer::bucket_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const auto& bucket : buckets_) {
    sizes.push_back(bucket.bytes());
  }
  return sizes;
}

bool Reducer::is_in_backward() const {
  const std::lock_guard lock(mutex_);
  return open_ && torch::autograd::get_current_node() != nullptr;
}

bool Reducer::rebuild_due() const {
  return !rebuilt_ && !finds_unused() && finished_passes_ > 0 &&
         arrival_.size() == parameters_.size();
}

bool Reducer::rebuild_is_due() const {
  const std::lock_guard lock(mutex_);
  return rebuild_due();
}

}  // namespace ddp
