#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// Every string in a JSON text, by the names on the way to it with dots between them:
/// {"a": {"b": "x"}, "c": 1} gives a.b = x. What lies in arrays has no names and is left out. Of a
/// name that is there twice the last one counts. Nothing where the text is no JSON, is cut off, or
/// is nested deeper than 32.
std::optional<std::map<std::string, std::string>> read_json_strings(std::string_view text);

}  // namespace ddp::launcher
