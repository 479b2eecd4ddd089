#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ddp::detail {

/// The variable's value; an empty one counts as missing, as in Python. Thread-safe as `getenv` is.
std::optional<std::string> environment(const char* name);

/// The whole number in variable `name`, within [minimum, maximum].
/// Throws UsageError that names the variable, what it holds and what sets it.
std::int64_t required_environment_integer(const char* name, std::int64_t minimum,
                                          std::int64_t maximum);

/// The same, or `fallback` where the variable is missing.
std::int64_t environment_integer(const char* name, std::int64_t minimum, std::int64_t maximum,
                                 std::int64_t fallback);

/// The variable's value; throws UsageError that names it where it is missing.
std::string required_environment(const char* name);

/// `text` as a whole decimal number, or nothing.
std::optional<std::int64_t> parse_integer(const std::string& text);

}  // namespace ddp::detail
