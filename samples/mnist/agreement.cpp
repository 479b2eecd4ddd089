#include "agreement.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/process_group/collectives.h>
#include <ddp/process_group/process_group.h>

namespace {

/// FNV-1a.
std::uint64_t checksum(const void* data, std::size_t size) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

/// The index of the first value that is not the same on all ranks, or -1.
std::int64_t first_difference(const torch::Tensor& values, torch::Device device) {
  // Combined with MAX, ~value gives the complement of the smallest one.
  const auto extremes = torch::stack({values, values.bitwise_not()}).to(device);
  ddp::all_reduce(extremes, ddp::ReduceOp::MAX);
  const auto differs = (extremes[0] != extremes[1].bitwise_not()).nonzero();
  return differs.numel() == 0 ? -1 : differs.min().item<std::int64_t>();
}

}  // namespace

std::uint64_t agreed_checksum(const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  std::vector<std::int64_t> checksums;
  for (const auto& parameter : parameters) {
    const auto values = parameter.value().detach().cpu().contiguous();
    checksums.push_back(
        static_cast<std::int64_t>(checksum(values.const_data_ptr(), values.nbytes())));
  }
  if (ddp::is_initialized() && !checksums.empty()) {
    const auto index =
        first_difference(torch::tensor(checksums), parameters.front().value().device());
    if (index >= 0) {
      throw std::runtime_error("the parameter " +
                               parameters[static_cast<std::size_t>(index)].key() +
                               " is not the same on all ranks");
    }
  }
  return checksum(checksums.data(), checksums.size() * sizeof(checksums[0]));
}
