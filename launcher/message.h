#pragma once

#include <string>
#include <string_view>

namespace ddp::launcher {

/// The text of a message: each line after the prefix "launch: ".
std::string message_text(std::string_view text);

/// Writes all of `text`, or as much as goes: errors are ignored.
void write_all(int fd, std::string_view text);

/// Writes `text` to standard error, each line after the prefix "launch: ", in one write, so that
/// it does not mix with what the workers write. Errors of the write are ignored: a terminal that
/// went away must not end the job.
void print_message(std::string_view text);

}  // namespace ddp::launcher
