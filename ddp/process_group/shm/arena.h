#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <sys/types.h>

#include <ddp/process_group/shm/mailbox.h>
#include <ddp/process_group/shm/segment.h>

namespace ddp::shm {

/// A rank's own memory that the other ranks can reach: its mailbox, and one segment for each
/// allocation. Allocations keep it alive. In a process that was forked it is the parent's: what is
/// released there stays as it is for the ranks.
///
/// Thread-safe.
class Arena {
 public:
  /// Throws ShmError.
  Arena();

  Mailbox& mailbox() const { return *mailbox_; }
  int mailbox_fd() const { return mailbox_segment_.fd(); }
  std::uint64_t cookie() const { return mailbox_->header.cookie; }

  /// Memory for at least `bytes`, aligned to 64 bytes. Throws ShmError.
  std::byte* allocate(std::size_t bytes);
  /// Gives back what `allocate` returned, to the system at once.
  void release(const void* data);
  /// The same of memory that other ranks may still read: they keep it as long as they look at it.
  void leave_to_others(const void* data);
  /// Where `bytes` from `data` on are for the other ranks; serial 0 where they are not in here.
  Place find(const void* data, std::size_t bytes) const;

 private:
  struct Allocation {
    Segment segment;
    std::uint32_t number = 0;
  };

  Segment remove(const void* data);

  const pid_t owner_;
  Segment mailbox_segment_;
  Mailbox* mailbox_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Allocation> allocations_;  // by the beginning of their segments
  std::uint64_t last_serial_ = 0;
};

}  // namespace ddp::shm
