#pragma once

#include <optional>
#include <string>
#include <vector>

#include <launcher/unique_fd.h>
#include <launcher/worker.h>

namespace ddp::launcher {

/// The files that TORCHELASTIC_ERROR_FILE names, one for each worker: a worker that ends by an
/// exception leaves its text there. With a folder for each worker they are error.json in it, and
/// stay. Else they are files in memory, reached by their path in /proc while the launcher runs:
/// nothing is left of them, whatever is killed.
class ErrorFiles {
 public:
  /// Without files.
  ErrorFiles() = default;

  /// In memory, one for each of `count` workers.
  explicit ErrorFiles(size_t count);

  /// In these folders.
  explicit ErrorFiles(const std::vector<std::string>& folders);

  /// The path for a worker; empty where it has none.
  std::string path_of(size_t worker) const;

  /// What the worker has left there, the beginning of it where it is long; empty where there is
  /// nothing.
  std::string content_of(size_t worker) const;

 private:
  std::vector<std::string> paths_;
  std::vector<UniqueFd> in_memory_;
};

/// Writes an error file. One that cannot be written is left: what is in it has been shown as well.
void write_error_file(const std::string& path, const std::string& content);

/// The text in an error file, to be shown in a report: of the JSON that torch's @record writes,
/// {"message": {"message": text, "extraInfo": {"py_callstack": text}}} or {"message": text}, these
/// texts, the call stack where there is one; of anything else the bytes as they are. Bounded in
/// length, and without control characters.
std::string error_text(const std::string& content);

/// When the error was, as the file says: message.extraInfo.timestamp_us, which `ddp::record_errors`
/// writes, or message.extraInfo.timestamp, in seconds since 1970. Nothing where there is neither.
std::optional<Worker::ErrorTime> error_time(const std::string& content);

}  // namespace ddp::launcher
