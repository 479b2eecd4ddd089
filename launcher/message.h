#pragma once

#include <string_view>

namespace ddp::launcher {

/// Writes `text` to standard error, each line after the prefix "launch: ", in one write, so that
/// it does not mix with what the workers write. Errors of the write are ignored: a terminal that
/// went away must not end the job.
void print_message(std::string_view text);

}  // namespace ddp::launcher
