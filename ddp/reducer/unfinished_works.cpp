#include <utility>

#include <fmt/format.h>

#include <ddp/reducer/unfinished_works.h>

namespace ddp::detail {
namespace {

/// Works under capture never end; of so many the oldest is forgotten.
constexpr std::size_t kMost = 4096;

const char* words(std::int64_t result) {
  switch (static_cast<c10d::WorkResult>(result)) {
    case c10d::WorkResult::TIMEOUT:
      return "it timed out: a rank did not come to it, or called another collective";
    case c10d::WorkResult::COMM_ERROR:
      return "the backend reported an error: a rank or a connection was lost (NCCL_DEBUG=WARN "
             "shows NCCL's own words)";
    default:
      return "the backend ended it for a reason of its own (NCCL_DEBUG=WARN shows NCCL's own "
             "words)";
  }
}

}  // namespace

void UnfinishedWorks::add(std::string what, c10d::Work& work) {
  Entry entry;
  try {
    entry = {std::move(what), work.getSequencenumber(), work.getFutureResult()};
  } catch (const std::exception&) {
    return;  // a backend that does not tell
  }
  if (!entry.result) {
    return;
  }
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
  if (entries_.size() > kMost) {
    entries_.pop_front();
  }
}

std::optional<std::string> UnfinishedWorks::failure() {
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.begin(); !failure_ && entry != entries_.end();) {
    if (!entry->result->completed()) {
      ++entry;
      continue;
    }
    const auto success = static_cast<std::int64_t>(c10d::WorkResult::SUCCESS);
    const auto result = entry->result->hasError() || !entry->result->constValue().isInt()
                            ? static_cast<std::int64_t>(c10d::WorkResult::UNKNOWN)
                            : entry->result->constValue().toInt();
    if (result != success) {
      failure_ = fmt::format("{} (number {} of the group) failed: {}", entry->what, entry->number,
                             words(result));
    }
    entry = entries_.erase(entry);
  }
  return failure_;
}

}  // namespace ddp::detail
