#include <ddp/reducer/scaled_copy.h>

namespace ddp::detail {
namespace {

/// Beyond it LibTorch's wider vectors count for more than its way there.
constexpr std::size_t kMostBytes = 64 * 1024;

template <class Value>
void multiply(const at::Tensor& target, const at::Tensor& source, double factor) {
  auto* const to = static_cast<Value*>(target.mutable_data_ptr());
  const auto* const from = static_cast<const Value*>(source.const_data_ptr());
  const auto by = static_cast<Value>(factor);
  const auto numel = target.numel();
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = from[i] * by;
  }
}

}  // namespace

bool scaled_copy(const at::Tensor& target, const at::Tensor& source, double factor) {
  const auto dtype = target.scalar_type();
  if ((dtype != at::kFloat && dtype != at::kDouble) || source.scalar_type() != dtype ||
      target.nbytes() > kMostBytes || !target.is_cpu() || !source.is_cpu() ||
      source.layout() != at::kStrided || source.is_neg() || source.sizes() != target.sizes() ||
      source.strides() != target.strides() || !target.is_non_overlapping_and_dense() ||
      (source.is_alias_of(target) && source.const_data_ptr() != target.const_data_ptr())) {
    return false;
  }
  if (dtype == at::kFloat) {
    multiply<float>(target, source, factor);
  } else {
    multiply<double>(target, source, factor);
  }
  target.unsafeGetTensorImpl()->bump_version();
  return true;
}

}  // namespace ddp::detail
