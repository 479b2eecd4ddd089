#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <launcher/split_arguments.h>
#include <launcher/variables.h>

namespace ddp::launcher {

/// The options as they were given: on the command line or, behind it, by the environment's PET_*
/// variables (PET_NNODES for --nnodes and so on; an empty one counts as not set). The readers throw
/// Error with the usage status, which names where the value came from.
class OptionValues {
 public:
  struct Value {
    std::string text;
    std::string source;  ///< "--nnodes" or "PET_NNODES"
    bool on_command_line;
  };

  OptionValues(const std::vector<SplitArguments::Given>& given, const VariableLookup& variables);

  /// Null where the option was not given.
  const Value* find(std::string_view name) const;

  bool flag(std::string_view name) const;

  /// `fallback` where it was not given; an empty value is an error.
  std::string text(std::string_view name, std::string_view fallback = "") const;

  /// `also` ends the sentence that says what is allowed.
  int whole_number(std::string_view name, int least, int most, int fallback,
                   std::string_view also = "") const;

  /// A number of seconds, 0 or more, with decimals.
  std::optional<std::chrono::milliseconds> seconds(std::string_view name) const;

 private:
  std::map<std::string, Value, std::less<>> values_;
};

/// Reads the whole of `text` as a number of seconds, 0 or more; nothing where it is none.
std::optional<std::chrono::milliseconds> parse_seconds(const std::string& text);

/// Reads the whole of `text` as a number from `least` to `most`; nothing where it is none.
std::optional<int> parse_whole_number(std::string_view text, int least, int most);

/// The parts of `text` between the commas; none for an empty text.
std::vector<std::string_view> split_at_commas(std::string_view text);

[[noreturn]] void usage_error(const std::string& text);

}  // namespace ddp::launcher
