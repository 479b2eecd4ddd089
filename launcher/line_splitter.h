#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// Cuts a stream of bytes into lines. A line ends at "\n", at "\r\n", or at a lone "\r", as
/// progress bars use it. What has no end after 64 KiB is cut there.
class LineSplitter {
 public:
  static constexpr size_t kLongest = 64 * 1024;

  /// `show(line, end)` is called for each line with '\n' or '\r'; `end_bar()` where a "\n" follows
  /// the "\r" that has just ended a line.
  template <typename Show, typename EndBar>
  void feed(std::string_view bytes, const Show& show, const EndBar& end_bar) {
    while (!bytes.empty()) {
      if (after_return_ && bytes.front() == '\n') {
        after_return_ = false;
        end_bar();
        bytes.remove_prefix(1);
        continue;
      }
      after_return_ = false;
      const size_t room = kLongest - line_.size();
      const auto end = bytes.substr(0, room).find_first_of("\r\n");
      if (end == std::string_view::npos) {
        line_.append(bytes.substr(0, room));
        bytes.remove_prefix(std::min(room, bytes.size()));
        if (line_.size() == kLongest) give(show, '\n');
        continue;
      }
      line_.append(bytes.substr(0, end));
      const bool both = bytes[end] == '\r' && end + 1 < bytes.size() && bytes[end + 1] == '\n';
      if (bytes[end] == '\n' || both) {
        give(show, '\n');
      } else if (!line_.empty()) {
        // The first "\r" of a bar ends nothing.
        give(show, '\r');
        after_return_ = true;
      }
      bytes.remove_prefix(end + (both ? 2 : 1));
    }
  }

  /// At the stream's end: a last line without an end of its own.
  template <typename Show>
  void finish(const Show& show) {
    if (!line_.empty()) give(show, '\n');
    after_return_ = false;
  }

 private:
  template <typename Show>
  void give(const Show& show, char end) {
    show(std::string_view(line_), end);
    line_.clear();
  }

  std::string line_;
  bool after_return_ = false;
};

}  // namespace ddp::launcher
