#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddp {

/// How long a rank waits to hear from the others why they failed, and for them to hear why it did.
constexpr std::chrono::milliseconds kReportPatience(2500);

/// How the reducer tells the other ranks that a backward pass failed, and hears whether theirs
/// did: beside the collectives, never on a path that succeeds. See Note [A failed pass].
///
/// Thread-safe.
class FailureChannel {
 public:
  virtual ~FailureChannel() = default;

  /// Says that this rank failed pass `pass` of the reducer named `scope`, and waits up to
  /// `patience` for every other rank to say the same. True: all ranks failed this pass, and each of
  /// them knows it. Never throws.
  virtual bool all_failed(const std::string& scope, std::uint64_t pass, const std::string& report,
                          std::chrono::milliseconds patience) = 0;

  /// Leaves the group for good: publishes `report` for the other ranks and closes this rank's
  /// connections, so that their collectives end. Never throws.
  virtual void abort(const std::string& report) = 0;

  /// To be called between `abort` and the error that may end this process: where what it has
  /// published would be lost with it, waits up to `patience` until the others have read it. Never
  /// throws.
  virtual void await_readers(std::chrono::milliseconds patience) = 0;

  /// What is known of the other ranks after a collective failed: one line for each that has
  /// published why it left, and one that lists those that have not been heard of within `patience`.
  /// Empty where nothing is known. Never throws.
  virtual std::string reports_of_others(std::chrono::milliseconds patience) = 0;

  /// Why this rank's group is not usable any more; empty while it is. Never throws.
  virtual std::string failure() const = 0;

  /// Whether a rank has left without a good-bye: its connection is closed. Costs a few system calls
  /// while none is, and asks the store otherwise. Never throws.
  virtual bool peer_lost() = 0;

  /// Ends this rank's operations in flight and closes its connections. Never throws.
  virtual void end_operations() = 0;
};

}  // namespace ddp
