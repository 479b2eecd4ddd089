#include <charconv>
#include <cstdlib>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>

namespace ddp::detail {
namespace {

constexpr const char* kWhoSetsIt =
    "Start the program with `launch`, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
    "MASTER_PORT, or set them yourself";

std::int64_t parse_variable(const char* name, const std::string& text, std::int64_t minimum,
                            std::int64_t maximum) {
  const auto value = parse_integer(text);
  if (!value || *value < minimum || *value > maximum) {
    throw UsageError(fmt::format(
        "the environment variable {} is \"{}\"; expected a whole number from {} to {}. {}.", name,
        text, minimum, maximum, kWhoSetsIt));
  }
  return *value;
}

}  // namespace

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::string(value);
}

std::optional<std::int64_t> parse_integer(const std::string& text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) {
    return std::nullopt;
  }
  return value;
}

std::string required_environment(const char* name) {
  auto value = environment(name);
  if (!value) {
    throw UsageError(fmt::format("the environment variable {} is not set. {}.", name, kWhoSetsIt));
  }
  return *value;
}

std::int64_t required_environment_integer(const char* name, std::int64_t minimum,
                                          std::int64_t maximum) {
  return parse_variable(name, required_environment(name), minimum, maximum);
}

std::int64_t environment_integer(const char* name, std::int64_t minimum, std::int64_t maximum,
                                 std::int64_t fallback) {
  const auto value = environment(name);
  return value ? parse_variable(name, *value, minimum, maximum) : fallback;
}

}  // namespace ddp::detail
