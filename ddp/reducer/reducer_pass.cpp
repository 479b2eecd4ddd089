#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

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
//   is the node that nests it. More gradients may come, and no later hook need fire in the outer
//   task; so that node gets a post hook, which runs in the outer task and queues the callback
//   there.
// - An exception in any node or hook drops the queued callbacks without calling them. The
//   callback's state then dies uncalled, which is how the reducer hears of it (EndOfBackward).

// Note [Static graph]
// ~~~~~~~~~~~~~~~~~~~
// With a static graph the first pass only learns: how often each parameter's hook fires, and which
// parameters no hook fires for. Its buckets are launched at its end. In the passes after it a
// parameter is ready when its hook has fired that often, so that it may be used in several
// re-entrant checkpoints, and those that are never used are ready from the beginning. A pass that
// finds another number is an error. The order of the collectives is that of c10d (reducer.cpp,
// delay_all_reduce): the map of used parameters first, in the first pass only.

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

void Reducer::on_gradient(std::size_t index, bool defined) {
  const std::lock_guard lock(mutex_);
  if (defined) {
    used_[index] = 1;
  }
  if (!synchronize_) {
    if (after_backward_) {
      queue_end_of_local_backward();
    }
    return;
  }
  if (!failure_.empty()) {
    throw CommunicationError(who() + failure_);
  }
  if (open_) {
    queue_end_of_backward();
  } else {
    begin_pass();
  }
  if (options_.static_graph) {
    count_firing(index);
  }
  const auto bucket = bucket_of_[index];
  if (bucket < next_bucket_) {
    refuse_gradient(
        fmt::format("a gradient for {} came a second time in this backward pass, after its bucket "
                    "had been sent. A parameter may be used several times in one forward; in "
                    "several re-entrant checkpoints only with "
                    "DistributedDataParallelOptions().static_graph(true).",
                    parameters_[index].name));
  }
  if (defined) {
    buckets_[bucket].collect(parameters_, position_of_[index], factor_for(buckets_[bucket]));
  }
  if (!options_.static_graph || (learned_ && firings_left_[index] == 0)) {
    mark_ready(index);
  }
}

void Reducer::count_firing(std::size_t index) {
  if (is_learning()) {
    ++firings_[index];
    ready_[index] = 1;
  } else if (firings_left_[index] == 0) {
    refuse_gradient(fmt::format(
        "the graph is not static: this backward pass gave {} more than the {} gradient{} that it "
        "got in the first pass. Every pass must use the same layers equally often; otherwise leave "
        "static_graph out.",
        parameters_[index].name, firings_[index], firings_[index] == 1 ? "" : "s"));
  } else {
    --firings_left_[index];
  }
}

void Reducer::refuse_gradient(const std::string& why) {
  pending_report_ = who() + why;
  throw UsageError(pending_report_);
}

void Reducer::mark_ready(std::size_t index) {
  if (ready_[index] != 0) {
    return;
  }
  ready_[index] = 1;
  if (!rebuilt_) {
    arrival_.push_back(index);
  }
  if (--buckets_[bucket_of_[index]].pending == 0) {
    launch_full_buckets();
  }
}

void Reducer::mark_all_ready() {
  for (auto& bucket : buckets_) {
    bucket.pending = 0;
  }
  launch_full_buckets();
}

void Reducer::begin_pass() {
  if (options_.python_compatible && !is_armed_) {
    throw UsageError(
        who() +
        "a second backward after one forward: Python's ranks leave its gradients local, so with "
        "python_compatible(true) it is refused. Add the losses up and call backward() once, or do "
        "the first one under no_sync().");
  }
  is_armed_ = false;
  // Nothing is open while this communicates: what it throws is not a failed pass.
  const int divisor = before_pass_ ? before_pass_() : process_group_->getSize();
  factor_ = hook_ ? 1.0 : 1.0 / divisor;
  // Python's ranks divide before they sum; in a join the number of ranks varies.
  native_average_ = !hook_ && !before_pass_ && !options_.python_compatible;
  backward_begin_ = Clock::now();
  open_pass();
  for (auto& bucket : buckets_) {
    bucket.begin(parameters_, !options_.gradient_as_bucket_view);
  }
  queue_end_of_backward();
  if (!learned_) {
    return;
  }
  firings_left_ = firings_;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (firings_[index] == 0) {
      ready_[index] = 1;
      --buckets_[bucket_of_[index]].pending;
    }
  }
  launch_full_buckets();
}

void Reducer::open_pass() {
  open_ = true;
  ++pass_;
  next_bucket_ = 0;
  std::fill(ready_.begin(), ready_.end(), 0);
  arrival_.clear();
  queued_tasks_.clear();
  if (is_learning()) {
    std::fill(firings_.begin(), firings_.end(), 0);
  }
  pending_report_.clear();
  for (auto& bucket : buckets_) {
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

void Reducer::continue_in_outer_task(std::function<void()> act) {
  using torch::autograd::utils::LambdaPostHook;
  torch::autograd::get_current_node()->add_post_hook(std::make_unique<LambdaPostHook>(
      [reducer = weak_from_this(), act = std::move(act)](
          const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
        if (const auto alive = reducer.lock()) {
          const std::lock_guard lock(alive->mutex_);
          act();
        }
        return outputs;
      }));
}

void Reducer::queue_end_of_local_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::find(queued_tasks_.begin(), queued_tasks_.end(), task) != queued_tasks_.end()) {
    return;
  }
  queued_tasks_ = {task};
  torch::autograd::Engine::get_default_engine().queue_callback([reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) {
      alive->end_of_local_backward();
    }
  });
}

void Reducer::end_of_local_backward() {
  const std::lock_guard lock(mutex_);
  queued_tasks_.clear();
  if (torch::autograd::get_current_node() != nullptr) {
    continue_in_outer_task([this] { queue_end_of_local_backward(); });
  } else if (after_backward_) {
    after_backward_();
  }
}

void Reducer::launch_full_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    // Counted first: a bucket whose launch throws counts as begun.
    launch(next_bucket_++);
  }
}

void Reducer::launch(std::size_t index) {
  auto& bucket = buckets_[index];
  if (index == 0) {
    comm_begin_ = Clock::now();
  }
  bucket.complete(parameters_, factor_for(bucket), used_);
  if (hook_) {
    launch_hook(index);
    return;
  }
  try {
    in_flight_[index].work = start_all_reduce(index);
  } catch (const std::exception& error) {
    communication_failed("the all-reduce of " + describe(index), detail::concise(error));
  }
}

c10::intrusive_ptr<c10d::Work> Reducer::start_all_reduce(std::size_t index) {
  auto& bucket = buckets_[index];
  std::vector<at::Tensor> tensors{bucket.message()};
  c10d::AllreduceOptions options;
  if (averages_natively(bucket)) {
    options.reduceOp = c10d::ReduceOp::AVG;
  }
  auto work = process_group_->allreduce(tensors, options);
  if (bucket.wait_kind == detail::WaitKind::kStream) {
    device_works_.add("the all-reduce of " + describe(index), *work);
  }
  return work;
}

bool Reducer::averages_natively(const Bucket& bucket) const {
  return native_average_ && bucket.averages_natively;
}

double Reducer::factor_for(const Bucket& bucket) const {
  return averages_natively(bucket) ? 1.0 : factor_;
}

void Reducer::launch_hook(std::size_t index) {
  const auto& bucket = buckets_[index];
  std::vector<at::Tensor> parameters;
  for (const auto parameter : bucket.indices()) {
    parameters.push_back(parameters_[parameter].tensor);
  }
  c10d::GradBucket native(index, buckets_.size(), bucket.typed_message(), bucket.offsets(),
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
  if (torch::autograd::get_current_node() != nullptr) {
    continue_in_outer_task([this, pass] {
      if (open_ && pass_ == pass) {
        queue_end_of_backward();
      }
    });
    return;
  }
  if (is_learning()) {
    start_used_map();
    mark_all_ready();
  } else if (next_bucket_ < buckets_.size()) {
    if (!finds_unused()) {
      fail_incomplete_pass();
    }
    mark_all_ready();
  }
  finish_pass();
}

void Reducer::fail_incomplete_pass() {
  const auto missing = describe_missing();
  const auto report =
      learned_
          ? fmt::format(
                "{}the graph is not static: this backward pass gave fewer gradients than the first "
                "one to:{}\nIt could not be averaged, and its gradients are dropped. Every pass "
                "must use the same layers equally often; otherwise leave static_graph out.",
                who(), missing)
          : fmt::format(
                "{}this backward pass gave no gradient to:{}\n"
                "It could not be averaged, and its gradients are dropped. Every parameter that "
                "requires a gradient must take part in the loss, in each pass and on every rank. "
                "If some layers are skipped on purpose, wrap with "
                "DistributedDataParallelOptions().find_unused_parameters(true); if a parameter is "
                "never used, do not register it, or freeze it with set_requires_grad(false) before "
                "wrapping.",
                who(), missing);
  const bool is_clean = fail_pass(report);
  throw UsageError(
      is_clean ? report
               : report + "\nThe other ranks did not fail alike, so this rank has left the group.");
}

void Reducer::start_used_map() {
  const auto device = parameters_.front().tensor.device();
  auto host = at::tensor(used_, at::kInt);
  // From pinned memory the copy does not wait for what the device has to do before it.
  used_map_ = (device.is_cuda() ? host.pin_memory() : host).to(device, /*non_blocking=*/true);
  std::vector<at::Tensor> tensors{used_map_};
  try {
    used_work_ = process_group_->allreduce(tensors);
    if (detail::wait_kind(*process_group_, device) == detail::WaitKind::kStream) {
      device_works_.add("the all-reduce of the used parameters", *used_work_);
    }
  } catch (const std::exception& error) {
    communication_failed("the all-reduce of the used parameters", detail::concise(error));
  }
}

void Reducer::wait_for_used_map() {
  bool done = false;
  std::string why = "it was aborted";
  try {
    done = detail::watched_wait(*used_work_, channel_.get(),
                                detail::wait_kind(*process_group_, used_map_.device()));
  } catch (const std::exception& error) {
    why = detail::concise(error);
  }
  if (!done) {
    communication_failed("the all-reduce of the used parameters", why);
  }
  if (std::find(used_.begin(), used_.end(), 0) == used_.end()) {
    used_anywhere_.clear();  // this rank has used them all, and need not read the map
    return;
  }
  refuse_capture("whether another rank used the parameters that this one did not");
  const auto host = used_map_.cpu();
  used_anywhere_.assign(host.data_ptr<std::int32_t>(),
                        host.data_ptr<std::int32_t>() + host.numel());
}

void Reducer::finish_pass() {
  const auto computed = Clock::now();
  // A hook may start collectives until its futures are done, and the map must not come between.
  if (finds_unused() && !hook_) {
    start_used_map();
  }
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    wait_for(index);
  }
  if (finds_unused() && hook_) {
    start_used_map();
  }
  if (used_work_) {
    wait_for_used_map();
  }
  for (auto& bucket : buckets_) {
    bucket.finish(parameters_, used_anywhere_);
  }
  if (learned_ && !rebuilt_ && arrival_.size() < parameters_.size()) {
    // What is never used comes last in the new layout.
    for (std::size_t index = 0; index < parameters_.size(); ++index) {
      if (firings_[index] == 0) {
        arrival_.push_back(index);
      }
    }
  }
  check_device_works();
  learned_ = options_.static_graph;
  record_times(computed);
  close_pass();
  ++finished_passes_;
}

void Reducer::record_times(Clock::time_point computed) {
  last_times_.forward_compute = backward_begin_ - forward_begin_;
  last_times_.backward_compute = computed - backward_begin_;
  last_times_.backward_comm = Clock::now() - comm_begin_;
  last_times_.backward_compute_comm_overlap = computed - comm_begin_;
  all_times_.forward_compute += last_times_.forward_compute;
  all_times_.backward_compute += last_times_.backward_compute;
  all_times_.backward_comm += last_times_.backward_comm;
  all_times_.backward_compute_comm_overlap += last_times_.backward_compute_comm_overlap;
  unused_bytes_ = 0;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (used_[index] == 0) {
      unused_bytes_ += static_cast<std::int64_t>(parameters_[index].tensor.nbytes());
    }
  }
}

void Reducer::shadow_pass() {
  const std::lock_guard lock(mutex_);
  factor_ = 1;
  native_average_ = false;
  forward_begin_ = backward_begin_ = Clock::now();
  open_pass();
  for (auto& bucket : buckets_) {
    bucket.begin_with_zeros(parameters_);
  }
  std::fill(used_.begin(), used_.end(), 0);
  if (is_learning()) {
    // Whatever the graph is, this rank brings nothing to it.
    start_used_map();
  } else if (!rebuilt_) {
    arrival_.resize(parameters_.size());
    std::iota(arrival_.begin(), arrival_.end(), 0);
  }
  mark_all_ready();
  finish_pass();
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
    done = detail::watched_wait(*in_flight.work, channel_.get(), buckets_[index].wait_kind);
  } catch (const std::exception& error) {
    communication_failed(what(), detail::concise(error));
  }
  if (!done) {
    communication_failed(what(), "it was aborted");
  }
  if (buckets_[index].is_sparse()) {
    buckets_[index].take_result(in_flight.work->result().front());
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
  used_work_.reset();
  if (after_backward_) {
    after_backward_();
  }
}

}  // namespace ddp
