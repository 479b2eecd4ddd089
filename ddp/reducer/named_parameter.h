#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A parameter that the reducer looks after, with its full name for messages.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  /// Its gradient is sparse (an embedding's): it gets a bucket of its own, and stays sparse.
  bool expects_sparse = false;
};

}  // namespace ddp
