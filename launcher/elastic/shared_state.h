#pragma once

#include <functional>
#include <optional>
#include <string>

#include <launcher/elastic/job_state.h>
#include <launcher/elastic/store.h>

namespace ddp::launcher {

/// The job's state in the store. Throws StoreError, also where the value is none of this version.
class SharedState {
 public:
  /// The store must outlive this object.
  SharedState(Store& store, std::string key) : store_(store), key_(std::move(key)) {}

  void create(const JobState& state);

  /// Reads the state, applies `change`, and writes the result if it is another and nobody has
  /// written meanwhile; else tries again. `change` may be called several times. Returns the state
  /// as it is then.
  JobState update(const std::function<void(JobState&)>& change);

 private:
  Store& store_;
  std::string key_;
};

}  // namespace ddp::launcher
