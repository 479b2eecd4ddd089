#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// target = source * factor for small tensors of the CPU, with the bits of at::mul_out: a loop
/// where LibTorch's way through dispatcher and iterator costs more than the multiplication. Does
/// nothing and returns false where that is not so: more than 64 KB, not float32 or float64 on both
/// sides, or memory that is not laid out alike and without gaps. The two may be the same memory.
/// Thread-safe for different targets.
bool scaled_copy(const at::Tensor& target, const at::Tensor& source, double factor);

}  // namespace ddp::detail
