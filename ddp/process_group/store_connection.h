#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/connections.h>

namespace ddp::detail {

/// A call to the store did not end as it should; `what()` is a clause that says how.
class StoreFailure : public std::runtime_error {
 public:
  enum class Kind {
    /// The store answered that the key did not come in time.
    kTimeout,
    /// The store did not answer at all: its process is stopped, or its machine cut off.
    kSilent,
    /// The connection is closed: the process that serves the store has ended.
    kClosed,
    /// Anything else, in the store's own words.
    kOther,
  };
  StoreFailure(Kind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

/// A connection of its own to a store, whose every call is bounded. See
/// Note [A store that does not answer].
///
/// Thread-safe; but calls wait for each other, so one that may be long delays the others.
class StoreConnection {
 public:
  using Task = std::function<std::string(c10d::Store&)>;

  explicit StoreConnection(const c10::intrusive_ptr<c10d::Store>& store);
  /// Ends the calls that are still blocked.
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  /// Runs `task` on a thread of its own and waits at most `limit` for its result. A task that does
  /// not end in time runs on, so it must own everything that it uses. Throws StoreFailure.
  std::string call(std::chrono::milliseconds limit, const Task& task);

 private:
  /// The threads that are at work.
  struct Threads {
    std::mutex mutex;
    std::condition_variable ended;
    int count = 0;
  };

  c10::intrusive_ptr<c10d::Store> store_;
  Connections connections_;
  std::shared_ptr<Threads> threads_ = std::make_shared<Threads>();
};

/// The store's exception that is being handled, as a StoreFailure.
StoreFailure store_failure(const std::exception& error);

}  // namespace ddp::detail
