#include <cctype>
#include <charconv>
#include <cstdlib>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/option_table.h>
#include <launcher/option_values.h>

namespace ddp::launcher {
namespace {

constexpr double kLongestSeconds = 366.0 * 24 * 3600;

std::string variable_of(std::string_view option) {
  std::string name = "PET_";
  for (const char letter : option) {
    name.push_back(static_cast<char>(std::toupper(static_cast<unsigned char>(letter))));
  }
  return name;
}

/// These are for who sits at the keyboard.
bool has_variable(const OptionSpec& option) {
  return option.name != "help" && option.name != "version";
}

bool is_on(const std::string& variable, std::string_view text) {
  for (const std::string_view on : {"1", "true", "True", "yes", "on"}) {
    if (text == on) return true;
  }
  for (const std::string_view off : {"0", "false", "False", "no", "off"}) {
    if (text == off) return false;
  }
  usage_error(fmt::format("{} must be 0 or 1, not '{}'", variable, text));
}

}  // namespace

void usage_error(const std::string& text) { throw Error(ExitStatus::kUsage, text); }

std::optional<int> parse_whole_number(std::string_view text, int least, int most) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end || value < least || value > most) return {};
  return value;
}

std::optional<std::chrono::milliseconds> parse_seconds(const std::string& text) {
  // Plain decimals; std::from_chars would need the mathematics library, which takes time to load.
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string::npos) return {};
  char* stopped = nullptr;
  const double seconds = std::strtod(text.c_str(), &stopped);
  if (*stopped != '\0' || seconds > kLongestSeconds) return {};
  return std::chrono::milliseconds(static_cast<long long>(seconds * 1000 + 0.5));
}

std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  if (text.empty()) return parts;
  while (true) {
    const auto comma = text.find(',');
    parts.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

OptionValues::OptionValues(const std::vector<SplitArguments::Given>& given,
                           const VariableLookup& variables) {
  for (const OptionSpec& option : option_table()) {
    if (!has_variable(option)) continue;
    const std::string variable = variable_of(option.name);
    const char* text = variables(variable.c_str());
    if (text == nullptr || *text == '\0') continue;
    if (!option.takes_value() && !is_on(variable, text)) continue;
    values_[std::string(option.name)] = {text, variable, false};
  }
  for (const auto& [option, value] : given) {
    values_[std::string(option->name)] = {value, fmt::format("--{}", option->name), true};
  }
}

const OptionValues::Value* OptionValues::find(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

bool OptionValues::flag(std::string_view name) const { return find(name) != nullptr; }

std::string OptionValues::text(std::string_view name, std::string_view fallback) const {
  const Value* value = find(name);
  if (value == nullptr) return std::string(fallback);
  if (value->text.empty()) usage_error(fmt::format("{} must not be empty", value->source));
  return value->text;
}

int OptionValues::whole_number(std::string_view name, int least, int most, int fallback,
                               std::string_view also) const {
  const Value* value = find(name);
  if (value == nullptr) return fallback;
  const auto number = parse_whole_number(value->text, least, most);
  if (!number) {
    usage_error(fmt::format("{} must be a whole number from {} to {}{}, not '{}'", value->source,
                            least, most, also, value->text));
  }
  return *number;
}

std::optional<std::chrono::milliseconds> OptionValues::seconds(std::string_view name) const {
  const Value* value = find(name);
  if (value == nullptr) return {};
  const auto time = parse_seconds(value->text);
  if (!time) {
    usage_error(fmt::format("{} must be a number of seconds, 0 or more, not '{}'", value->source,
                            value->text));
  }
  return time;
}

}  // namespace ddp::launcher
