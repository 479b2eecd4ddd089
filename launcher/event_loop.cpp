#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/event_loop.h>

namespace ddp::launcher {

EventLoop::EventLoop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) {
    throw Error(ExitStatus::kSetup,
                fmt::format("cannot watch the workers: {}", std::strerror(errno)));
  }
}

bool EventLoop::watch(int fd, uint32_t events, EventTag tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = pack(tag);
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void EventLoop::forget(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace ddp::launcher
