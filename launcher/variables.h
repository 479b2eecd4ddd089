#pragma once

#include <functional>

namespace ddp::launcher {

/// Looks a variable of the environment up: its text, or null where it is not set. `::getenv` is
/// one; tests bring their own.
using VariableLookup = std::function<const char*(const char* name)>;

}  // namespace ddp::launcher
