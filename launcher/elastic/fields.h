#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::launcher {

// Note [Elastic encoding]
// What launchers tell each other, and one launcher's processes, is a list of fields, each its
// length in decimal, ':' and its bytes: "3:abc0:2:17" is "abc", "", "17". Numbers are decimal,
// flags "0" and "1", a list its length and then its members. Any bytes go through, nothing needs to
// be escaped, and what was cut short is noticed. The first field of the shared state is the
// format's number: a launcher of another version is refused and not misunderstood.

/// Writes fields one after another.
class FieldWriter {
 public:
  FieldWriter& text(std::string_view value);
  FieldWriter& number(int64_t value);
  FieldWriter& flag(bool value) { return number(value ? 1 : 0); }

  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

/// Reads them in the same order. Throws std::invalid_argument where they are something else.
class FieldReader {
 public:
  /// `text` must outlive this object.
  explicit FieldReader(std::string_view text) : rest_(text) {}

  std::string text();
  int64_t number();
  int integer();
  bool flag() { return number() != 0; }
  /// A list's length, which cannot be more than the bytes that are left.
  size_t count();
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace ddp::launcher
