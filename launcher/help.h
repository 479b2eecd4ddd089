#pragma once

#include <string>

namespace ddp::launcher {

/// The text of `--help`.
std::string help_text();

}  // namespace ddp::launcher
