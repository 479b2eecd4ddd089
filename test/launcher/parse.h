#pragma once

#include <map>
#include <string>
#include <vector>

#include <launcher/error.h>
#include <launcher/options.h>

// Command lines for the tests of the options.
namespace ddp::launcher::test {

using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

inline std::vector<const char*> pointers(const Words& words) {
  std::vector<const char*> result;
  for (const std::string& word : words) result.push_back(word.c_str());
  return result;
}

/// An environment of these variables and no others; it must not outlive `variables`.
inline VariableLookup lookup(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found != variables.end() ? found->second.c_str() : nullptr;
  };
}

inline Options parse(Words words, const std::string& called = "/usr/bin/launch",
                     const Variables& variables = {}) {
  words.insert(words.begin(), called);
  return parse_options(pointers(words), lookup(variables));
}

inline Options parse(const Words& words, const Variables& variables) {
  return parse(words, "/usr/bin/launch", variables);
}

/// The error that this command line gives.
inline Error refused(const Words& words, const Variables& variables = {}) {
  try {
    parse(words, variables);
  } catch (const Error& error) {
    return error;
  }
  return Error(0, "it was accepted");
}

}  // namespace ddp::launcher::test
