#include <c10/util/Exception.h>

#include <ddp/error_text.h>

namespace ddp::detail {

std::string concise(const std::exception& error) {
  std::string text;
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error)) {
    text = c10_error->what_without_backtrace();
  } else {
    text = error.what();
  }
  for (const char* tail : {"\nException raised from", "\nThis may indicate a possible"}) {
    if (const auto at = text.find(tail); at != std::string::npos) {
      text.resize(at);
    }
  }
  // Gloo begins with its source's path: "[/some/path/pair.cc:547] ".
  if (text.rfind("[/", 0) == 0) {
    if (const auto end = text.find("] "); end != std::string::npos) {
      text.erase(0, end + 2);
    }
  }
  if (text.find("Application timeout caused pair closure") != std::string::npos) {
    // Gloo's words for every operation that ends because another one did.
    text = "the group's connections were closed after another operation had failed";
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.')) {
    text.pop_back();
  }
  return text;
}

std::string concise(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return concise(known);
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace ddp::detail
