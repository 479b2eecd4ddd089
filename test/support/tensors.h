#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace ddp::test {

/// The bits of a tensor, for comparison between ranks.
inline std::string bits(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous().cpu();
  std::string text;
  const auto* bytes = static_cast<const unsigned char*>(dense.data_ptr());
  for (std::size_t i = 0; i < dense.nbytes(); ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

inline std::string bits_of_all(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += bits(tensor) + ",";
  }
  return text;
}

inline void set_values(const at::Tensor& parameter, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  parameter.copy_(values.view_as(parameter));
}

}  // namespace ddp::test
