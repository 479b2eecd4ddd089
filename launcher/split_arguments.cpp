#include <string_view>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/split_arguments.h>

namespace ddp::launcher {
namespace {

[[noreturn]] void unknown_option(std::string_view argument, std::string_view name) {
  const std::string nearest = suggest_option(name);
  throw Error(
      ExitStatus::kUsage,
      fmt::format("unknown option {}{}\nOptions of the program go after its name; see "
                  "launch --help for the launcher's own.",
                  argument, nearest.empty() ? "" : fmt::format("; did you mean --{}?", nearest)));
}

bool is_known_option(std::string_view argument) {
  if (argument == "-h" || argument == "--") return true;
  if (argument.substr(0, 2) != "--") return false;
  argument.remove_prefix(2);
  return find_option(argument.substr(0, argument.find('='))) != nullptr;
}

}  // namespace

SplitArguments split_arguments(std::span<const char* const> arguments) {
  SplitArguments result;
  size_t i = 0;
  for (; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--") {
      ++i;
      break;
    }
    if (argument.empty() || argument.front() != '-') break;
    if (argument == "-h") {
      result.options.push_back({find_option("help"), ""});
      continue;
    }
    const auto equals = argument.find('=');
    const std::string_view spelled = argument.substr(0, equals);
    const std::string_view name =
        spelled.substr(std::min(spelled.find_first_not_of('-'), spelled.size()));
    const OptionSpec* option =
        spelled.substr(0, 2) == "--" ? find_option(spelled.substr(2)) : nullptr;
    if (option == nullptr) unknown_option(spelled, name);

    if (!option->takes_value()) {
      if (equals != std::string_view::npos) {
        throw Error(ExitStatus::kUsage,
                    fmt::format("{} takes no value: write {} alone", argument, spelled));
      }
      result.options.push_back({option, ""});
    } else if (equals != std::string_view::npos) {
      result.options.push_back({option, std::string(argument.substr(equals + 1))});
    } else {
      // A value may begin with a dash (a negative number has its own error later), but an option
      // in its place means that the value was forgotten.
      if (i + 1 == arguments.size() || is_known_option(arguments[i + 1])) {
        throw Error(ExitStatus::kUsage,
                    fmt::format("{0} needs a value: {0} {1}", spelled, option->value));
      }
      result.options.push_back({option, arguments[++i]});
    }
  }
  for (; i < arguments.size(); ++i) result.command.emplace_back(arguments[i]);
  return result;
}

}  // namespace ddp::launcher
