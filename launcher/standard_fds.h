#pragma once

namespace ddp::launcher {

/// Opens /dev/null where standard input, output or error is closed: a file that is opened later
/// must not become one of them by accident.
void fill_standard_fds();

/// Puts /dev/null in the place of standard input: whoever feeds it must notice when rank 0, to whom
/// it belongs, no longer reads.
void release_standard_input();

}  // namespace ddp::launcher
