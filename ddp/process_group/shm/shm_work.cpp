#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <ddp/process_group/shm/shm_work.h>

namespace ddp::shm {

c10::intrusive_ptr<c10::ivalue::Future> TensorTask::future() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (is_finished_) {
      complete(*future_);
    }
  }
  return future_;
}

void TensorTask::complete(c10::ivalue::Future& future) const {
  if (error()) {
    future.setError(error());
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

void TensorTask::finished() noexcept {
  c10::intrusive_ptr<c10::ivalue::Future> waiting;
  {
    const std::lock_guard lock(mutex_);
    is_finished_ = true;
    waiting = future_;
  }
  if (waiting) {
    try {
      complete(*waiting);  // runs what was to follow
    } catch (const std::exception&) {
      // A callback's own: the collective is done nevertheless.
    }
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout <= std::chrono::milliseconds::zero()
                         ? Queue::never()
                         : Clock::now() + std::min<std::chrono::milliseconds>(timeout, kLongest);
  TORCH_CHECK(queue_->wait(*task_, limit),
              fmt::format("the collective is not done after {} ms", timeout.count()));
  if (task_->error()) {
    std::rethrow_exception(task_->error());
  }
  return true;
}

}  // namespace ddp::shm
