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

// Note [Reducer state machine]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A *pass* opens when the first hook fires while the reducer synchronises, and closes at the end of
// the backward() call, in a callback that this first hook queues on the autograd engine. So a pass
// that should have reduced every gradient and could not is an error of that very backward(), not of
// the next forward.
//
// A parameter is ready when its hook has fired; it may fire again (a checkpoint) until its bucket
// is launched. A bucket is launched when all of its parameters are ready *and* every bucket before
// it was launched: the order of the collectives is then the same on all ranks, whatever the order
// of the hooks.
//
// Two traps of the engine:
// - Inside a re-entrant backward (a checkpoint that calls backward() in its own backward) the
//   callback runs at the end of the *nested* graph task, when torch::autograd::get_current_node()
//   is not null. The pass stays open, and the next hook of another graph task queues a callback
//   there.
// - An exception in any node or hook drops the queued callbacks without calling them. The
//   callback's state then dies uncalled, which is how the reducer hears of it (EndOfBackward).

namespace ddp {
/// What the engine holds until the end of backward: called, or destroyed uncalled after an
/// exception.
struct Reducer::EndOfBackward {
  std::weak_ptr<Reducer> reducer;
  std::uint64_t pass = 0;
  int task = -1;
  bool called = false;

  EndOfBackward() = default;
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    if (called) {
      return;
    }
    if (const auto alive = reducer.lock()) {
      alive->backward_died(pass);
    }
  }
};

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
      factor_(1.0 / process_group_->getSize()),
      ready_(parameters_.size(), 0),
      used_(parameters_.size(), 0) {
  set_buckets(first_assignment());
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
    const auto& [name, tensor] = parameters_[index];
    auto& hook = hooks_[index];
    if (tensor.scalar_type() != c10::typeMetaToScalarType(hook.options.dtype()) ||
        tensor.device() != hook.options.device() || tensor.sizes() != hook.sizes) {
      throw UsageError(fmt::format(
          "{}the parameter {} was {} of shape [{}] on {} when the model was wrapped and is {} of "
          "shape [{}] on {} now: change dtype, device and shapes before wrapping, or wrap the "
          "model again",
          who(), name, c10::toString(c10::typeMetaToScalarType(hook.options.dtype())),
          fmt::join(hook.sizes, ", "), hook.options.device().str(),
          c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
          tensor.device().str()));
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

// ---- A pass ----

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
        "{}the backward pass before this forward did not end: its last gradients came from inside "
        "a re-entrant "
        "checkpoint, and none came to:{}\nEvery parameter must take part in the loss; with layers "
        "that are skipped on "
        "purpose, use DistributedDataParallelOptions().find_unused_parameters(true).",
        who(), describe_missing());
    fail_pass(report);
    throw UsageError(report);
  }
  follow_parameters();
  if (!rebuilt_ && !options_.find_unused_parameters && finished_passes_ > 0 &&
      arrival_.size() == parameters_.size()) {
    rebuild_buckets();
  }
}

void Reducer::on_gradient(std::size_t index, bool defined) {
  const std::lock_guard lock(mutex_);
  if (defined) {
    used_[index] = 1;
  }
  if (!synchronize_) {
    return;
  }
  if (!failure_.empty()) {
    throw CommunicationError(who() + failure_);
  }
  if (!open_) {
    begin_pass();
  }
  queue_end_of_backward();
  const auto bucket = bucket_of_[index];
  if (bucket < next_bucket_) {
    pending_report_ = fmt::format(
        "{}a gradient for {} came a second time in this backward pass, after its bucket had been "
        "sent. A parameter may be used several times in one forward, but not in several re-entrant "
        "checkpoints.",
        who(), parameters_[index].name);
    throw UsageError(pending_report_);
  }
  if (parameters_[index].tensor.grad().defined() && parameters_[index].tensor.grad().is_sparse()) {
    pending_report_ = fmt::format(
        "{}the gradient of {} is sparse, which is not supported: build the embedding with "
        "sparse(false)",
        who(), parameters_[index].name);
    throw UsageError(pending_report_);
  }
  if (defined) {
    buckets_[bucket].collect(parameters_, position_of_[index], hook_ ? 1.0 : factor_);
  }
  if (ready_[index] == 0) {
    ready_[index] = 1;
    if (!rebuilt_) {
      arrival_.push_back(index);
    }
    if (--buckets_[bucket].pending == 0) {
      launch_full_buckets();
    }
  }
}

void Reducer::begin_pass() {
  open_ = true;
  ++pass_;
  next_bucket_ = 0;
  std::fill(ready_.begin(), ready_.end(), 0);
  arrival_.clear();
  queued_tasks_.clear();
  pending_report_.clear();
  for (auto& bucket : buckets_) {
    bucket.begin(parameters_, !options_.gradient_as_bucket_view);
    bucket.pending = bucket.indices().size();
  }
}

void Reducer::queue_end_of_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::find(queued_tasks_.begin(), queued_tasks_.end(), task) != queued_tasks_.end()) {
    return;
  }
  auto end = std::make_shared<EndOfBackward>();
  end->reducer = weak_from_this();
  end->pass = pass_;
  end->task = task;
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->called = true;
    if (const auto reducer = end->reducer.lock()) {
      reducer->end_of_backward(end->pass, end->task);
    }
  });
  queued_tasks_.push_back(task);
}

void Reducer::launch_full_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    // Counted first: a bucket whose launch throws counts as begun.
    launch(next_bucket_++);
  }
}

void Reducer::launch(std::size_t index) {
  auto& bucket = buckets_[index];
  bucket.complete(parameters_, hook_ ? 1.0 : factor_, used_);
  if (hook_) {
    launch_hook(index);
    return;
  }
  std::vector<at::Tensor> tensors{bucket.flat()};
  try {
    in_flight_[index].work = process_group_->allreduce(tensors);
  } catch (const std::exception& error) {
    communication_failed("the all-reduce of " + describe(index), detail::concise(error));
  }
}

void Reducer::launch_hook(std::size_t index) {
  const auto& bucket = buckets_[index];
  std::vector<at::Tensor> parameters;
  for (const auto parameter : bucket.indices()) {
    parameters.push_back(parameters_[parameter].tensor);
  }
  c10d::GradBucket native(index, buckets_.size(), bucket.typed_flat(), bucket.offsets(),
                          bucket.lengths(), bucket.sizes(), std::move(parameters), std::nullopt);
  std::string why = "it returned no future";
  try {
    in_flight_[index].future = hook_(native);
  } catch (...) {
    why = detail::concise(std::current_exception());
  }
  if (!in_flight_[index].future) {
    communication_failed("the communication hook for " + describe(index), why);
  }
}

void Reducer::end_of_backward(std::uint64_t pass, int task) {
  const std::lock_guard lock(mutex_);
  if (!open_ || pass != pass_) {
    return;
  }
  queued_tasks_.erase(std::remove(queued_tasks_.begin(), queued_tasks_.end(), task),
                      queued_tasks_.end());
  if (next_bucket_ < buckets_.size()) {
    if (torch::autograd::get_current_node() != nullptr) {
      return;  // the end of a nested graph task only
    }
    if (!options_.find_unused_parameters) {
      const auto report = fmt::format(
          "{}this backward pass gave no gradient to:{}\n"
          "It could not be averaged, and its gradients are dropped. Every parameter that "
          "requires a gradient "
          "must take part in the loss, in each pass and on every rank. If some layers are skipped "
          "on purpose, wrap "
          "with DistributedDataParallelOptions().find_unused_parameters(true); if a parameter is "
          "never used, do not "
          "register it, or freeze it with set_requires_grad(false) before wrapping.",
          who(), describe_missing());
      const bool is_clean = fail_pass(report);
      throw UsageError(
          is_clean
              ? report
              : report + "\nThe other ranks did not fail alike, so this rank has left the group.");
    }
    for (auto& bucket : buckets_) {
      bucket.pending = 0;
    }
    launch_full_buckets();
  }
  finish_pass();
}

void Reducer::finish_pass() {
  std::vector<std::int32_t> used_anywhere;
  at::Tensor used_map;
  c10::intrusive_ptr<c10d::Work> used_work;
  const auto start_used_map = [&] {
    used_map = at::tensor(used_, at::kInt).to(parameters_.front().tensor.device());
    std::vector<at::Tensor> tensors{used_map};
    try {
      used_work = process_group_->allreduce(tensors);
    } catch (const std::exception& error) {
      communication_failed("the all-reduce of the used parameters", detail::concise(error));
    }
  };
  // A hook may start collectives until its futures are done, and the map must not come between.
  if (options_.find_unused_parameters && !hook_) {
    start_used_map();
  }
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    wait_for(index);
  }
  if (options_.find_unused_parameters && hook_) {
    start_used_map();
  }
  if (used_work) {
    try {
      detail::watched_wait(*used_work, channel_.get());
    } catch (const std::exception& error) {
      communication_failed("the all-reduce of the used parameters", detail::concise(error));
    }
    const auto host = used_map.cpu();
    used_anywhere.assign(host.data_ptr<std::int32_t>(),
                         host.data_ptr<std::int32_t>() + host.numel());
  }
  for (auto& bucket : buckets_) {
    bucket.finish(parameters_, used_anywhere);
  }
  close_pass();
  ++finished_passes_;
}

void Reducer::wait_for(std::size_t index) {
  auto& in_flight = in_flight_[index];
  if (in_flight.future) {
    wait_for_hook(index);
    return;
  }
  const auto what = [&] { return "the all-reduce of " + describe(index); };
  bool done = false;
  try {
    done = detail::watched_wait(*in_flight.work, channel_.get());
  } catch (const std::exception& error) {
    communication_failed(what(), detail::concise(error));
  }
  if (!done) {
    communication_failed(what(), "it was aborted");
  }
}

void Reducer::wait_for_hook(std::size_t index) {
  std::string why;
  try {
    auto& future = *in_flight_[index].future;
    detail::watched_wait(future, channel_.get());
    buckets_[index].take_result(detail::parse_hook_result(future.value()));
    return;
  } catch (...) {
    why = detail::concise(std::current_exception());
  }
  communication_failed("the communication hook for " + describe(index), why);
}

void Reducer::close_pass() {
  open_ = false;
  std::fill(used_.begin(), used_.end(), 0);
  in_flight_.assign(buckets_.size(), {});
}

}  // namespace ddp
