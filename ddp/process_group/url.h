#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace ddp::detail {

/// An `init_method`: `env://`, `tcp://host:port?key=value&...` or `file:///path?key=value&...`.
struct Url {
  std::string text;
  std::string scheme;
  /// For `tcp`; an IPv6 address without its brackets.
  std::string host;
  std::optional<std::uint16_t> port;
  /// For `file`.
  std::string path;
  std::map<std::string, std::string> query;
};

/// Throws UsageError that quotes the address and says how one looks.
Url parse_url(const std::string& text);

}  // namespace ddp::detail
