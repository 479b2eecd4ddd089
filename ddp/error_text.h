#pragma once

#include <exception>
#include <string>

namespace ddp::detail {

/// An exception's own words: without c10's backtrace and source location, on one line.
std::string concise(const std::exception& error);

/// The same for whatever is being handled or was stored.
std::string concise(const std::exception_ptr& error);

}  // namespace ddp::detail
