#include <stdexcept>

#include <fmt/format.h>

#include <launcher/elastic/shared_state.h>

namespace ddp::launcher {
namespace {

/// Each failed try means that somebody else has succeeded.
constexpr int kMostTries = 100000;

}  // namespace

void SharedState::create(const JobState& state) { store_.set(key_, encode(state)); }

JobState SharedState::update(const std::function<void(JobState&)>& change) {
  auto text = store_.get(key_);
  if (!text) throw StoreError("the job's state is missing");
  for (int tries = 0; tries < kMostTries; ++tries) {
    JobState before;
    try {
      before = decode_job_state(*text);
    } catch (const std::invalid_argument& error) {
      throw StoreError(error.what());
    }
    JobState after = before;
    change(after);
    if (after == before) return before;
    ++after.version;
    const std::string desired = encode(after);
    text = store_.compare_set(key_, *text, desired);
    if (*text == desired) return after;
  }
  throw StoreError("the job's state changes too often");
}

}  // namespace ddp::launcher
