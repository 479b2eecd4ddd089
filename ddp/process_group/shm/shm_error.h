#pragma once

#include <stdexcept>

namespace ddp::shm {

/// Shared memory cannot be had, or a collective over it has failed. The text names the ranks at
/// fault, not the rank that throws.
class ShmError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace ddp::shm
