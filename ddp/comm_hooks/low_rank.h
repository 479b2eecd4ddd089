#pragma once

#include <cstdint>
#include <random>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

// The parts of PowerSGD (Vogels, Karimireddy, Jaggi: PowerSGD, practical low-rank gradient
// compression for distributed optimization, NeurIPS 2019) that its two hooks share.

namespace ddp::comm_hooks::detail {

/// Makes the columns of each matrix orthonormal, in place: Gram-Schmidt up to two columns and for
/// half precision, else by QR. `matrices` is batch x rows x columns, with no more columns than
/// rows. `epsilon` is added to the norm that a column is divided by; where it is 0, a column of
/// zeros stays one.
void orthogonalize(const at::Tensor& matrices, double epsilon);

/// Seeds for random starts: the numbers of NumPy's `RandomState(seed).randint(1000000000)`, so that
/// ranks that run Python draw the same.
class StartSeeds {
 public:
  explicit StartSeeds(std::uint32_t seed) : engine_(seed) {}

  std::uint32_t next();
  /// A CPU generator that begins at the next seed.
  at::Generator next_generator();

 private:
  std::mt19937 engine_;
};

/// Fills `matrix` with standard normal values that are drawn on the CPU, as Python draws them.
void fill_randomly(const at::Tensor& matrix, const at::Generator& generator);

}  // namespace ddp::comm_hooks::detail
