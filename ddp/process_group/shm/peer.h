#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sys/types.h>
#include <vector>

#include <ddp/process_group/shm/mailbox.h>
#include <ddp/process_group/shm/segment.h>

namespace ddp::shm {

/// Another rank's process, and its memory as it is mapped here.
///
/// `has_ended` is thread-safe; one thread at a time does the rest.
class Peer {
 public:
  /// Opens the mailbox that process `pid` has as `fd`, and makes sure by its cookie that it is that
  /// of the rank which said so. Throws ShmError.
  Peer(pid_t pid, int fd, std::uint64_t cookie);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Mailbox& mailbox() const { return *mailbox_; }
  pid_t pid() const { return pid_; }

  /// Whether the process has ended, in whatever way.
  bool has_ended() const;

  /// `bytes` of the rank's memory at a place that it has announced. Mapped when first asked for.
  /// Throws ShmError.
  std::byte* resolve(const Place& place, std::size_t bytes);

 private:
  struct Attached {
    std::uint64_t serial = 0;
    Segment segment;
  };

  const pid_t pid_;
  int process_ = -1;  // a pidfd
  Segment mailbox_segment_;
  Mailbox* mailbox_ = nullptr;
  std::vector<Attached> attached_;
};

}  // namespace ddp::shm
