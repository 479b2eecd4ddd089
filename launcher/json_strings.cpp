#include <cstdint>
#include <utility>

#include <launcher/json_strings.h>

namespace ddp::launcher {
namespace {

constexpr int kDeepest = 32;

/// Reads one value after the other; each function returns whether what it wants was there.
class Reader {
 public:
  explicit Reader(std::string_view text) : left_(text) {}

  bool document() { return value("", 0, true) && (skip_space(), left_.empty()); }

  std::map<std::string, std::string> strings;

 private:
  void skip_space() {
    const auto end = left_.find_first_not_of(" \t\r\n");
    left_.remove_prefix(end == std::string_view::npos ? left_.size() : end);
  }

  bool take(char wanted) {
    skip_space();
    if (left_.empty() || left_.front() != wanted) return false;
    left_.remove_prefix(1);
    return true;
  }

  bool value(const std::string& path, int depth, bool named) {
    if (depth > kDeepest) return false;
    skip_space();
    if (left_.empty()) return false;
    switch (left_.front()) {
      case '{':
        return object(path, depth, named);
      case '[':
        return array(path, depth);
      case '"': {
        std::string text;
        if (!string(text)) return false;
        if (named) strings[path] = text;
        return true;
      }
      default:
        return word();
    }
  }

  bool object(const std::string& path, int depth, bool named) {
    take('{');
    if (take('}')) return true;
    do {
      std::string name;
      skip_space();
      if (!string(name) || !take(':')) return false;
      if (!value(path.empty() ? name : path + "." + name, depth + 1, named)) return false;
    } while (take(','));
    return take('}');
  }

  bool array(const std::string& path, int depth) {
    take('[');
    if (take(']')) return true;
    do {
      if (!value(path, depth + 1, false)) return false;
    } while (take(','));
    return take(']');
  }

  /// A number, true, false, null.
  bool word() {
    const auto end = left_.find_first_not_of(
        "0123456789+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
    const size_t size = end == std::string_view::npos ? left_.size() : end;
    left_.remove_prefix(size);
    return size > 0;
  }

  bool string(std::string& text) {
    if (left_.empty() || left_.front() != '"') return false;
    left_.remove_prefix(1);
    while (!left_.empty()) {
      const char c = left_.front();
      left_.remove_prefix(1);
      if (c == '"') return true;
      if (c != '\\') {
        text.push_back(c);
      } else if (!escape(text)) {
        return false;
      }
    }
    return false;
  }

  bool escape(std::string& text) {
    if (left_.empty()) return false;
    const char c = left_.front();
    left_.remove_prefix(1);
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const auto known = kLetters.find(c);
    if (known != std::string_view::npos) {
      text.push_back(kMeanings[known]);
      return true;
    }
    uint32_t code = 0;
    if (c != 'u' || !four_digits(code)) return false;
    uint32_t low = 0;
    if (code >= 0xd800 && code < 0xdc00 && left_.substr(0, 2) == "\\u") {
      left_.remove_prefix(2);
      if (!four_digits(low)) return false;
      code = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)
                                           : 0xfffd;
    }
    append_utf8(text, code >= 0xd800 && code < 0xe000 ? 0xfffd : code);
    return true;
  }

  bool four_digits(uint32_t& code) {
    if (left_.size() < 4) return false;
    for (int i = 0; i < 4; ++i) {
      constexpr std::string_view kDigits = "0123456789abcdefABCDEF";
      const auto digit = kDigits.find(left_[static_cast<size_t>(i)]);
      if (digit == std::string_view::npos) return false;
      code = code * 16 + static_cast<uint32_t>(digit < 16 ? digit : digit - 6);
    }
    left_.remove_prefix(4);
    return true;
  }

  static void append_utf8(std::string& text, uint32_t code) {
    const auto add = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      add(code);
    } else if (code < 0x800) {
      add(0xc0 | (code >> 6));
      add(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      add(0xe0 | (code >> 12));
      add(0x80 | ((code >> 6) & 0x3f));
      add(0x80 | (code & 0x3f));
    } else {
      add(0xf0 | (code >> 18));
      add(0x80 | ((code >> 12) & 0x3f));
      add(0x80 | ((code >> 6) & 0x3f));
      add(0x80 | (code & 0x3f));
    }
  }

  std::string_view left_;
};

}  // namespace

std::optional<std::map<std::string, std::string>> read_json_strings(std::string_view text) {
  Reader reader(text);
  if (!reader.document()) return {};
  return std::move(reader.strings);
}

}  // namespace ddp::launcher
