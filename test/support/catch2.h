#pragma once

// Catch2 2 and 3 under one name.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Matchers::ContainsSubstring;
inline auto contains(const std::string& text) { return ContainsSubstring(text); }
#else
#include <catch2/catch.hpp>
inline auto contains(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif
