#pragma once

#include <map>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// Puts values in the place of ${name} and $name. What is no known name stays as it is.
std::string expand_template(std::string_view text,
                            const std::map<std::string, std::string, std::less<>>& values);

}  // namespace ddp::launcher
