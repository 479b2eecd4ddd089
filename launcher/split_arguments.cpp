#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/split_arguments.h>

namespace ddp::launcher {
namespace {

/// Options of torchrun that this launcher has not, on purpose: what to do instead.
constexpr std::pair<std::string_view, std::string_view> kRefused[] = {
    {"logs_specs",
     "it names a Python class, and this launcher runs no Python; use --log_dir, --redirects and "
     "--tee"},
    {"duplicate_stdout_filters", "use --tee with --log_dir, and grep the files"},
    {"duplicate_stderr_filters", "use --tee with --log_dir, and grep the files"},
};

[[noreturn]] void unknown_option(std::string_view argument, std::string_view name) {
  std::string wanted(name);
  std::replace(wanted.begin(), wanted.end(), '-', '_');
  for (const auto& [refused, instead] : kRefused) {
    if (wanted == refused) {
      throw Error(ExitStatus::kUsage, fmt::format("there is no {} here: {}", argument, instead));
    }
  }
  const std::string nearest = suggest_option(name);
  throw Error(
      ExitStatus::kUsage,
      fmt::format("unknown option {}{}\nOptions of the program go after its name; see "
                  "launch --help for the launcher's own.",
                  argument, nearest.empty() ? "" : fmt::format("; did you mean --{}?", nearest)));
}

/// An argument that begins with a dash, taken apart.
struct Spelled {
  const OptionSpec* option = nullptr;  ///< null: there is none of that name
  std::string_view name;               ///< as it was written, dashes included
  bool has_value = false;              ///< --x=1, -r1, -r=1
  std::string_view value;
};

Spelled take_apart(std::string_view argument) {
  Spelled spelled;
  if (argument.substr(0, 2) != "--" && argument.size() >= 2) {
    spelled.option = find_option(argument[1]);
    spelled.name = argument.substr(0, 2);
    std::string_view rest = argument.substr(2);
    if (spelled.option == nullptr || (!spelled.option->takes_value() && !rest.empty())) {
      spelled.option = nullptr;
      spelled.name = argument.substr(0, argument.find('='));
      return spelled;
    }
    spelled.has_value = !rest.empty();
    if (spelled.has_value && rest.front() == '=') rest.remove_prefix(1);
    spelled.value = rest;
    return spelled;
  }
  const auto equals = argument.find('=');
  spelled.name = argument.substr(0, equals);
  spelled.has_value = equals != std::string_view::npos;
  if (spelled.has_value) spelled.value = argument.substr(equals + 1);
  if (argument.substr(0, 2) == "--") spelled.option = find_option(spelled.name.substr(2));
  return spelled;
}

bool is_known_option(std::string_view argument) {
  if (argument == "--") return true;
  return argument.substr(0, 1) == "-" && take_apart(argument).option != nullptr;
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
    const auto [option, name, has_value, value] = take_apart(argument);
    if (option == nullptr) {
      unknown_option(name, name.substr(std::min(name.find_first_not_of('-'), name.size())));
    }
    if (!option->takes_value()) {
      if (has_value) {
        throw Error(ExitStatus::kUsage,
                    fmt::format("{} takes no value: write {} alone", argument, name));
      }
      result.options.push_back({option, ""});
    } else if (has_value) {
      result.options.push_back({option, std::string(value)});
    } else {
      // A value may begin with a dash (a negative number has its own error later), but an option
      // in its place means that the value was forgotten.
      if (i + 1 == arguments.size() || is_known_option(arguments[i + 1])) {
        throw Error(ExitStatus::kUsage,
                    fmt::format("{0} needs a value: {0} {1}", name, option->value));
      }
      result.options.push_back({option, arguments[++i]});
    }
  }
  for (; i < arguments.size(); ++i) result.command.emplace_back(arguments[i]);
  return result;
}

}  // namespace ddp::launcher
