#pragma once

#include <span>
#include <string>
#include <vector>

#include <launcher/option_table.h>

namespace ddp::launcher {

/// A command line cut in two at the program's name.
struct SplitArguments {
  struct Given {
    const OptionSpec* option;
    std::string value;  ///< empty for a flag
  };
  std::vector<Given> options;        ///< the launcher's own, in the order given
  std::vector<std::string> command;  ///< the program and its arguments, byte for byte
};

/// Cuts `arguments` (argv without its first element) at the first one that is neither an option of
/// the launcher nor an option's value; a single `--` just before the program is dropped. What
/// follows the program's name is never looked at: it may look like the launcher's own options.
/// Throws Error for an unknown option, a missing value, and a value given to a flag.
SplitArguments split_arguments(std::span<const char* const> arguments);

}  // namespace ddp::launcher
