#pragma once

#include <string>

#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// A regular file at `path` gets the first free name of path.1, path.2, ...: it is an earlier
/// run's, or that of a run with the same id which still writes to it. Where there is none, nothing
/// happens. False, with errno, where it cannot be renamed.
bool set_aside(const std::string& path);

/// A new file at `path`, opened to write at its end; what lay there is set aside. Anything but a
/// regular file, as /dev/null, is opened as it is. Empty, with errno, where that fails.
UniqueFd create_file(const std::string& path);

}  // namespace ddp::launcher
