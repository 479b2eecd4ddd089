#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::detail {

/// The length of the UTF-8 character that `text` begins with; 0 where it begins with something
/// else.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::size_t length = byte(0) < 0x80   ? 1
                             : byte(0) < 0xc2 ? 0
                             : byte(0) < 0xe0 ? 2
                             : byte(0) < 0xf0 ? 3
                             : byte(0) < 0xf5 ? 4
                                              : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Longer than need be, a half of a pair, or beyond the last character.
  const bool no_character =
      (byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) > 0x9f) ||
      (byte(0) == 0xf0 && byte(1) < 0x90) || (byte(0) == 0xf4 && byte(1) > 0x8f);
  return no_character ? 0 : length;
}

/// `text` as a string of JSON, with its quotes. What is not UTF-8 becomes U+FFFD: a reader may
/// refuse the whole text for it. Thread-safe.
inline std::string json_quoted(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string quoted = "\"";
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const char first = text.front();
    if (length == 0) {
      quoted.append("\\ufffd");
    } else if (first == '"' || first == '\\') {
      quoted.append({'\\', first});
    } else if (first == '\n') {
      quoted.append("\\n");
    } else if (length == 1 && (first < ' ' || first == 0x7f)) {
      quoted.append({'\\', 'u', '0', '0', kDigits[first >> 4], kDigits[first & 0xf]});
    } else {
      quoted.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return quoted.append("\"");
}

}  // namespace ddp::detail
