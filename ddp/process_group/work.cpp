#include <ddp/process_group/work.h>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/error_text.h>

namespace ddp {

Work::Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<detail::StoreChannel> channel, std::string name)
    : work_(std::move(work)), channel_(std::move(channel)), name_(std::move(name)) {}

void Work::wait() {
  if (!work_) {
    return;
  }
  try {
    if (work_->wait()) {
      return;
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    detail::fail_collective(*channel_, name_, detail::concise(error));
  }
  detail::fail_collective(*channel_, name_, "it was aborted");
}

bool Work::is_completed() const { return !work_ || work_->isCompleted(); }

}  // namespace ddp
