#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace ddp::launcher {

/// One worker process: who it is, and how it ended once it has.
struct Worker {
  enum class End {
    kRunning,
    kExited,    ///< code in `code`
    kSignaled,  ///< signal in `code`
  };

  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  std::chrono::system_clock::time_point started;

  End end = End::kRunning;
  int code = 0;
  bool core_dumped = false;
  std::chrono::system_clock::time_point ended;
  bool stopped = false;  ///< ended after the launcher had told it to

  std::vector<std::string> files;  ///< where what it wrote lies
  std::string error_text;          ///< what it left in its error file

  /// When it wrote that, as the file itself says; torch's @record knows the second alone.
  struct ErrorTime {
    std::chrono::system_clock::time_point earliest;
    std::chrono::system_clock::time_point latest;
  };
  std::optional<ErrorTime> error_time;
  bool told_to_end = false;  ///< it had failed, and had not ended when the launcher told it to

  /// Whether its process group may have members. Once it is empty its number may be given to
  /// somebody else's group, in a job of days: it must not be used any more.
  bool group_alive = true;

  bool running() const { return end == End::kRunning; }
  bool failed() const { return end == End::kSignaled || (end == End::kExited && code != 0); }

  /// Its exit status as a shell gives it.
  int status() const { return end == End::kSignaled ? 128 + code : code; }

  /// Takes over a status as wait gives it.
  void ended_with(int wait_status);
};

}  // namespace ddp::launcher
