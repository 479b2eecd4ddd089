#pragma once

#include <chrono>
#include <string>

#include <launcher/worker.h>

namespace ddp::launcher {

// A launcher may itself be a worker of another one, or of torchrun: that one is told why it failed,
// in the file that TORCHELASTIC_ERROR_FILE names.

/// An error file that says `text`.
std::string error_content(const std::string& text, std::chrono::system_clock::time_point time);

/// What to say of a job with this root cause, whose own error file has `content`: that, and where
/// it is not JSON as torch's @record writes it (or nothing), JSON that says it.
std::string error_content(const Worker& root_cause, const std::string& content,
                          const std::string& host);

/// Writes the file; nothing where there is no outer launcher.
void tell_outer_launcher(const std::string& error_content);

/// Says, on standard error and to the outer launcher, why this launcher could not do its work.
void say_failure(const std::string& text);

}  // namespace ddp::launcher
