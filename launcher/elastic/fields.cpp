#include <charconv>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

#include <launcher/elastic/fields.h>

namespace ddp::launcher {
namespace {

[[noreturn]] void refuse() {
  throw std::invalid_argument("these are no fields of a launcher of this version");
}

template <typename Number>
Number parse(std::string_view text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end) refuse();
  return value;
}

}  // namespace

FieldWriter& FieldWriter::text(std::string_view value) {
  text_ += fmt::format("{}:{}", value.size(), value);
  return *this;
}

FieldWriter& FieldWriter::number(int64_t value) { return text(std::to_string(value)); }

std::string FieldReader::text() {
  const auto colon = rest_.find(':');
  if (colon == std::string_view::npos) refuse();
  const auto size = parse<size_t>(rest_.substr(0, colon));
  if (size > rest_.size() - colon - 1) refuse();
  const std::string value(rest_.substr(colon + 1, size));
  rest_.remove_prefix(colon + 1 + size);
  return value;
}

int64_t FieldReader::number() { return parse<int64_t>(text()); }

int FieldReader::integer() {
  const int64_t value = number();
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) refuse();
  return static_cast<int>(value);
}

size_t FieldReader::count() {
  const int64_t value = number();
  if (value < 0 || static_cast<size_t>(value) > rest_.size()) refuse();
  return static_cast<size_t>(value);
}

}  // namespace ddp::launcher
