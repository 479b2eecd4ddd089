#pragma once

#include <sys/epoll.h>

#include <cstdint>

#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// What an event is about.
struct EventTag {
  enum class Source : uint32_t { kControl, kChild, kWorker, kPipe, kScreen, kAgent };
  Source source;
  uint32_t index;  ///< which worker, pipe or screen
};

/// File descriptors that are waited for at once: a thin layer over epoll, level-triggered.
class EventLoop {
 public:
  /// Throws Error.
  EventLoop();

  /// Returns whether the kernel takes it: a regular file is not to be waited for.
  bool watch(int fd, uint32_t events, EventTag tag);
  void forget(int fd);

  /// Waits at most `timeout` milliseconds (-1: as long as it takes) and calls `on_event(tag)` for
  /// each descriptor that is ready, in the order in which they became so.
  template <typename OnEvent>
  void wait(int timeout, const OnEvent& on_event) {
    epoll_event events[kAtOnce];
    const int count = ::epoll_wait(epoll_.get(), events, kAtOnce, timeout);
    for (int i = 0; i < count; ++i) on_event(unpack(events[i].data.u64));
  }

 private:
  static constexpr int kAtOnce = 64;

  static uint64_t pack(EventTag tag) {
    return (static_cast<uint64_t>(tag.source) << 32) | tag.index;
  }
  static EventTag unpack(uint64_t packed) {
    return {static_cast<EventTag::Source>(packed >> 32), static_cast<uint32_t>(packed)};
  }

  UniqueFd epoll_;
};

}  // namespace ddp::launcher
