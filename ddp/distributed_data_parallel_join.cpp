#include <utility>

#include <fmt/format.h>

#include <ddp/distributed_data_parallel_base.h>
#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/reducer/reducer.h>

// The wrapper's join; see Note [Uneven inputs].

namespace ddp {

void DistributedDataParallelBase::join(const std::function<void()>& body,
                                       const JoinOptions& options) {
  if (join_) {
    throw UsageError(who() + "join: the model is in a join already");
  }
  if (options_.python_compatible()) {
    throw UsageError(who() +
                     "join: Python's ranks do not know this protocol, so with "
                     "python_compatible(true) it is refused");
  }
  if (!options.enable()) {
    body();
    return;
  }
  const auto channel = detail::channel_of(group_);
  join_ = std::make_unique<detail::JoinSession>(group_, channel, options,
                                                wrapped_->parameters().front().device());
  reducer_->set_before_pass([this] {
    const int active = join_->announce(detail::JoinWord::kBackward);
    return join_->options().divide_by_initial_world_size() ? group_->getSize() : active;
  });
  const auto leave = [this] {
    reducer_->set_before_pass({});
    join_.reset();
  };
  try {
    body();
    join_shadow();
  } catch (...) {
    const bool all_know = join_->ended_everywhere() || !channel->failure().empty();
    leave();
    if (!all_know) {
      // The others would wait for this rank's word.
      channel->abort(who() + "the body of join ended with an exception: " +
                     detail::concise(std::current_exception()));
      channel->await_readers(kReportPatience);
    }
    throw;
  }
  leave();
}

void DistributedDataParallelBase::join_shadow() {
  while (const auto word = join_->listen()) {
    switch (*word) {
      case detail::JoinWord::kBuffers:
        reducer_->prepare_for_forward();
        broadcast_buffers(join_->last_active());
        break;
      case detail::JoinWord::kForward:
        reducer_->prepare_for_forward();
        break;
      case detail::JoinWord::kBackward:
        reducer_->shadow_pass();
        break;
      case detail::JoinWord::kJoined:
      case detail::JoinWord::kExhausted:
        break;  // not an active rank's
    }
  }
  try {
    synchronize_module_states(join_->last_active());
  } catch (const std::exception& error) {
    detail::fail_collective(*detail::channel_of(group_),
                            "giving the last rank's parameters and buffers to all ranks",
                            detail::concise(error));
  }
}

}  // namespace ddp
