#include <cerrno>
#include <poll.h>
#include <string>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

#include <fmt/format.h>

#include <ddp/process_group/shm/peer.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {
namespace {

int open_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

}  // namespace

Peer::Peer(pid_t pid, int fd, std::uint64_t cookie) : pid_(pid), process_(open_process(pid)) {
  // In this order: a process that was given the number since does not have the cookie.
  try {
    if (process_ < 0) {
      throw ShmError(fmt::format("process {} cannot be watched (pidfd_open: {})", pid,
                                 std::generic_category().message(errno)));
    }
    mailbox_segment_ = Segment::attach(pid, fd, sizeof(Mailbox));
    mailbox_ = reinterpret_cast<Mailbox*>(mailbox_segment_.data());
    if (mailbox_->header.magic != kMagic || mailbox_->header.cookie != cookie) {
      throw ShmError(fmt::format("the memory of process {} is not that of the rank", pid));
    }
  } catch (const ShmError&) {
    if (process_ >= 0) {
      close(process_);
    }
    throw;
  }
}

Peer::~Peer() {
  if (process_ >= 0) {
    close(process_);
  }
}

bool Peer::has_ended() const {
  pollfd polled{process_, POLLIN, 0};
  return poll(&polled, 1, 0) == 1;
}

std::byte* Peer::resolve(const Place& place, std::size_t bytes) {
  const auto fail = [&] {
    throw ShmError(
        fmt::format("the memory of process {} is not what the rank announced: the tensor was freed "
                    "while it was in use",
                    pid_));
  };
  if (place.segment >= kSegments) {
    fail();
  }
  if (place.segment >= attached_.size()) {
    attached_.resize(place.segment + 1);
  }
  auto& known = attached_[place.segment];
  if (known.serial != place.serial) {
    known = Attached();
    const auto& entry = mailbox_->segments[place.segment];
    known.segment = Segment::attach(pid_, entry.fd, entry.bytes);
    const auto* header = reinterpret_cast<const SegmentHeader*>(known.segment.data());
    if (header->magic != kMagic || header->cookie != mailbox_->header.cookie ||
        header->serial != place.serial) {
      fail();
    }
    known.serial = place.serial;
  }
  if (place.offset + bytes > known.segment.bytes()) {
    throw ShmError(
        fmt::format("the memory of process {} is smaller than the rank announced", pid_));
  }
  return known.segment.data() + place.offset;
}

}  // namespace ddp::shm
