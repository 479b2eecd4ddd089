#pragma once

// Catch2 in its versions 2 and 3.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif

#include <cstdio>
#include <cstdlib>

/// What CTest takes for a skipped test (SKIP_RETURN_CODE). Ends the process: under CTest each test
/// case has one of its own.
[[noreturn]] inline void skip_test(const char* why) {
  std::printf("skipped: %s\n", why);
  std::fflush(stdout);
  std::_Exit(77);
}
