#pragma once

#include <stdexcept>
#include <string>

namespace ddp::launcher {

/// The launcher's own exit statuses. A failed worker's status is passed on as it is, and
/// 128 + N stands for signal N, as in a shell.
struct ExitStatus {
  static constexpr int kSetup = 1;            ///< port in use, unknown host, no resources
  static constexpr int kUsage = 2;            ///< the command line is wrong
  static constexpr int kTimeout = 124;        ///< the job took longer than --timeout
  static constexpr int kNotExecutable = 126;  ///< the program is there and cannot be run
  static constexpr int kNotFound = 127;       ///< there is no such program
  static constexpr int kSignalBase = 128;
};

/// Ends the launcher before any worker has started: what() says why and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(int status, const std::string& text) : std::runtime_error(text), status_(status) {}

  int status() const noexcept { return status_; }

 private:
  int status_;
};

}  // namespace ddp::launcher
