#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// One option of the command line. This table is the only place that knows which options there
/// are: the splitting of argv, the environment's PET_* variables, `--help` and the suggestions all
/// read it.
struct OptionSpec {
  std::string_view name;   ///< canonical spelling, with underscores
  char letter;             ///< the short form, 0: none
  std::string_view value;  ///< what its value is called in `--help`; empty for a flag
  std::string_view group;  ///< the heading it stands under in `--help`
  std::string_view help;

  bool takes_value() const { return !value.empty(); }
};

std::span<const OptionSpec> option_table();

/// The option called `name` (without its leading dashes, `-` and `_` taken as the same), or null.
/// Names are never abbreviated: an abbreviation that works today changes its meaning the day that
/// another option is added.
const OptionSpec* find_option(std::string_view name);

/// The option with this short form, or null.
const OptionSpec* find_option(char letter);

/// The known name nearest to `name`, or an empty string where none is near.
std::string suggest_option(std::string_view name);

}  // namespace ddp::launcher
