#pragma once

#include <sys/resource.h>

#include <cstddef>

namespace ddp::launcher {

/// The launcher's limit on open files, raised as far as it goes without rights: with many workers
/// it needs several for each of them. The workers get the limit that was there before.
class FileLimit {
 public:
  FileLimit();

  /// What a worker gets.
  const rlimit& original() const { return original_; }

  /// How many files more may be opened, with some left over for the launcher's own small needs.
  size_t available() const;

  size_t limit() const { return limit_; }

 private:
  rlimit original_{};
  size_t limit_ = 0;
};

}  // namespace ddp::launcher
