#pragma once

namespace ddp::detail {

/// What a ProcessGroup does not tell of its backend.
class Connected {
 public:
  virtual ~Connected() = default;
  /// Of how many other ranks the connections are closed. Thread-safe.
  virtual int peers_gone() const = 0;
};

}  // namespace ddp::detail
