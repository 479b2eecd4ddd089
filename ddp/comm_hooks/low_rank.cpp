#include <tuple>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <ddp/comm_hooks/low_rank.h>

namespace ddp::comm_hooks::detail {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  for (std::int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    const auto norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
    if (epsilon == 0) {
      column.div_(norm);
      column.masked_fill_(norm == 0, 0);
    } else {
      column.div_(norm + epsilon);
    }
    if (i + 1 < columns) {
      const auto rest = matrices.narrow(2, i + 1, columns - i - 1);
      rest.sub_(at::sum(column * rest, {1}, /*keepdim=*/true) * column);
    }
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= 2 || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices, "reduced")));
  }
}

std::uint32_t StartSeeds::next() {
  // NumPy's legacy rule for numbers below n: the low bits that n - 1 needs, until one is not above.
  constexpr std::uint32_t kLargest = 999'999'999;
  constexpr std::uint32_t kMask = (std::uint32_t{1} << 30) - 1;
  std::uint32_t value = 0;
  do {
    value = static_cast<std::uint32_t>(engine_()) & kMask;
  } while (value > kLargest);
  return value;
}

at::Generator StartSeeds::next_generator() { return at::detail::createCPUGenerator(next()); }

void fill_randomly(const at::Tensor& matrix, const at::Generator& generator) {
  matrix.copy_(at::randn(matrix.sizes(), generator, at::dtype(matrix.scalar_type())));
}

}  // namespace ddp::comm_hooks::detail
