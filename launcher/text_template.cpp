#include <cctype>

#include <launcher/text_template.h>

namespace ddp::launcher {

std::string expand_template(std::string_view text,
                            const std::map<std::string, std::string, std::less<>>& values) {
  std::string result;
  while (!text.empty()) {
    const auto dollar = text.find('$');
    result.append(text.substr(0, dollar));
    if (dollar == std::string_view::npos) break;
    text.remove_prefix(dollar);
    const bool braces = text.substr(1, 1) == "{";
    const size_t begin = braces ? 2 : 1;
    size_t end = begin;
    while (end < text.size() &&
           (std::isalnum(static_cast<unsigned char>(text[end])) != 0 || text[end] == '_')) {
      ++end;
    }
    const auto found = values.find(text.substr(begin, end - begin));
    const bool closed = !braces || (end < text.size() && text[end] == '}');
    if (found == values.end() || !closed) {
      result.push_back('$');
      text.remove_prefix(1);
      continue;
    }
    result.append(found->second);
    text.remove_prefix(end + (braces ? 1 : 0));
  }
  return result;
}

}  // namespace ddp::launcher
