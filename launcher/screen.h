#pragma once

#include <string>
#include <string_view>

#include <launcher/event_loop.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// The launcher's own standard output or error as the place where workers' lines are shown.
/// Nobody waits for a slow reader (a pager, a terminal that was stopped): what it does not take yet
/// is kept, and `full()` asks those who write to pause. When the reader has gone, what is written
/// is dropped. A write error (a full disk) is the same.
class Screen {
 public:
  /// `fd` 1 or 2.
  Screen(int fd, EventLoop& loop, EventTag tag);

  /// Shows one line of `speaker` after its prefix, at the next flush(). `end` is "\n", or "\r" for
  /// a progress bar: the next line of the same speaker then goes over it, and one of somebody else
  /// below it.
  void show(const void* speaker, std::string_view prefix, std::string_view line, char end);

  /// Ends a progress bar's line at the next flush(), where the last thing shown was one of
  /// `speaker`.
  void end_bar(const void* speaker);

  /// Shows a message of the launcher at once.
  void say(std::string_view text);

  /// Writes as much as goes; also called when the loop says that more goes.
  void flush();

  bool full() const { return waiting() > kMostWaiting; }
  bool empty() const { return waiting() == 0; }

  /// Drops what is waiting, and all that comes.
  void abandon();

 private:
  static constexpr size_t kMostWaiting = 1 << 20;

  size_t waiting() const { return queue_.size() - written_; }
  void append(std::string_view text);
  long write_some(std::string_view text) const;
  void watch(bool wanted);

  enum class Way {
    kPlain,   ///< write() that does not wait, or a regular file
    kSocket,  ///< send() that does not wait
    kPolled,  ///< write() of small pieces when poll() says that they fit
  };

  EventLoop& loop_;
  EventTag tag_;
  int fd_;
  UniqueFd reopened_;  ///< the same pipe or terminal, not waiting
  Way way_ = Way::kPlain;
  bool watched_ = false;
  bool dead_ = false;
  std::string queue_;
  size_t written_ = 0;
  const void* bar_of_ = nullptr;
};

/// Whether both descriptors are the same file, pipe or terminal.
bool same_file(int a, int b);

}  // namespace ddp::launcher
