#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include <fmt/format.h>

#include <launcher/screen.h>

namespace ddp::launcher {

// Note [Writing without waiting]
// The launcher must hear signals and see workers end while the reader of its output is slow. Its
// standard output cannot simply be made non-blocking: that flag belongs to the open file, which is
// shared with the shell and everybody else. So a pipe or terminal is opened a second time, through
// /proc, with the flag; a socket has a flag for each call; a regular file never waits. Where that
// does not work (a terminal of another user), the launcher writes at most as much as poll()
// guarantees to fit.
Screen::Screen(int fd, EventLoop& loop, EventTag tag) : loop_(loop), tag_(tag), fd_(fd) {
  struct stat status {};
  ::fstat(fd, &status);
  if (S_ISREG(status.st_mode)) return;
  if (S_ISSOCK(status.st_mode)) {
    way_ = Way::kSocket;
    return;
  }
  reopened_ = UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                              O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (reopened_) {
    fd_ = reopened_.get();
  } else {
    way_ = Way::kPolled;
  }
}

void Screen::show(const void* speaker, std::string_view prefix, std::string_view line, char end) {
  if (bar_of_ != nullptr && bar_of_ != speaker) append("\n");
  bar_of_ = end == '\r' ? speaker : nullptr;
  append(prefix);
  append(line);
  append(std::string_view(&end, 1));
}

void Screen::end_bar(const void* speaker) {
  if (bar_of_ != speaker) return;
  bar_of_ = nullptr;
  append("\n");
}

void Screen::say(std::string_view text) {
  if (bar_of_ != nullptr) append("\n");
  bar_of_ = nullptr;
  append(text);
  flush();
}

void Screen::append(std::string_view text) {
  if (!dead_) queue_.append(text);
}

long Screen::write_some(std::string_view text) const {
  if (way_ == Way::kSocket)
    return ::send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (way_ == Way::kPolled) {
    pollfd poll{fd_, POLLOUT, 0};
    if (::poll(&poll, 1, 0) == 0) {
      errno = EAGAIN;
      return -1;
    }
    return ::write(fd_, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
  }
  return ::write(fd_, text.data(), text.size());
}

void Screen::flush() {
  while (!empty()) {
    const long count = write_some(std::string_view(queue_).substr(written_));
    if (count > 0) {
      written_ += static_cast<size_t>(count);
    } else if (count < 0 && errno == EINTR) {
      continue;
    } else if (count < 0 && errno == EAGAIN) {
      // Moving what is left each time would cost more than it saves.
      if (written_ > kMostWaiting) {
        queue_.erase(0, written_);
        written_ = 0;
      }
      watch(true);
      return;
    } else {
      abandon();
    }
  }
  queue_.clear();
  written_ = 0;
  watch(false);
}

void Screen::abandon() {
  dead_ = true;
  queue_.clear();
  written_ = 0;
  watch(false);
}

void Screen::watch(bool wanted) {
  if (wanted == watched_) return;
  watched_ = wanted;
  if (wanted) {
    loop_.watch(fd_, EPOLLOUT, tag_);
  } else {
    loop_.forget(fd_);
  }
}

bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

}  // namespace ddp::launcher
