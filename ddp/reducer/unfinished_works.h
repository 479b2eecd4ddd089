#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::detail {

/// Works that a stream waits for, and no thread: how they ended is learned afterwards. What is kept
/// of a work is its result, not its tensors; and no question goes to the device, so that a stream
/// may be under capture meanwhile.
///
/// Thread-safe.
class UnfinishedWorks {
 public:
  /// `what` names the work in an error.
  void add(std::string what, c10d::Work& work);

  /// What is known to have failed: the work, its number in the group, and how. Empty while nothing
  /// has.
  std::optional<std::string> failure();

 private:
  struct Entry {
    std::string what;
    std::uint64_t number = 0;
    c10::intrusive_ptr<c10::ivalue::Future> result;
  };

  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::optional<std::string> failure_;
};

}  // namespace ddp::detail
