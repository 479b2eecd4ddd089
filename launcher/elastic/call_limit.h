#pragma once

#include <chrono>
#include <string>

namespace ddp::launcher {

/// While it lives: when `time` is over the process ends, after it has sent `set_last_words`. For
/// calls that nothing else ends (see store_abi.h). One at a time; SIGALRM is its own.
class CallLimit {
 public:
  explicit CallLimit(std::chrono::milliseconds time);
  ~CallLimit();
  CallLimit(const CallLimit&) = delete;
  CallLimit& operator=(const CallLimit&) = delete;

  /// What is sent to `socket` then.
  static void set_last_words(int socket, const std::string& text);
};

}  // namespace ddp::launcher
