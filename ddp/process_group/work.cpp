#include <utility>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/work.h>
#include <ddp/reducer/watched_wait.h>

namespace ddp {
namespace {

bool is_point_to_point(const c10d::Work& work) {
  const auto type = work.retrieveOpType();
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
         type == c10d::OpType::RECVANYSOURCE;
}

}  // namespace

Work::Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<detail::StoreChannel> channel,
           std::string name, std::function<void()> finish, detail::WaitKind wait_kind)
    : work_(std::move(work)),
      channel_(std::move(channel)),
      name_(std::move(name)),
      finish_(finish ? std::make_shared<std::function<void()>>(std::move(finish)) : nullptr),
      wait_kind_(wait_kind) {
  if (work_ && wait_kind_ == detail::WaitKind::kStream) {
    channel_->watch_on_device(name_, *work_);
  }
}

void Work::wait() {
  if (work_) {
    bool done = false;
    try {
      done = is_point_to_point(*work_) && wait_kind_ == detail::WaitKind::kHost
                 ? detail::watched_wait_apart(work_, channel_)
                 : detail::watched_wait(*work_, channel_.get(), wait_kind_);
    } catch (const std::exception& error) {
      detail::fail_collective(*channel_, name_, detail::concise(error));
    }
    if (!done) {
      detail::fail_collective(*channel_, name_, "it was aborted");
    }
  }
  if (finish_ && *finish_) {
    std::exchange(*finish_, nullptr)();
  }
}

bool Work::is_completed() const { return !work_ || work_->isCompleted(); }

int Work::source_rank() const {
  if (!work_) {
    throw UsageError("source_rank: there is no work: only what recv returned has a source");
  }
  return work_->sourceRank();
}

}  // namespace ddp
