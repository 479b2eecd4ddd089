#pragma once

namespace ddp::launcher {

/// What /proc and ps show for this process. `argc` and `argv` are main's; their strings are
/// overwritten.
void rename_process(int argc, char** argv, const char* title);

}  // namespace ddp::launcher
