#pragma once

#include <stdexcept>
#include <string>

namespace ddp {

/// Base class of every error that the library throws itself.
///
/// `what()` is complete on its own: it names the rank (where there is a group already), the thing
/// at fault (variable, address, parameter), what was expected, what was found and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The program or its environment is at fault: a malformed variable, models that differ between
/// ranks, a parameter without a gradient. The process group stays usable unless the text says
/// otherwise.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// Ranks could not be reached, left, or did not answer within the timeout. The process group is
/// not usable any more: destroy it, or end the process.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

}  // namespace ddp
