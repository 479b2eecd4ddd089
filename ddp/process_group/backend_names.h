#pragma once

#include <optional>
#include <string>

namespace ddp::detail {

/// What carries a group's communication, by device.
struct BackendNames {
  /// "gloo", "shm", or "" for the best one here.
  std::string cpu;
  /// Whether CUDA tensors go over NCCL; over the CPU's backend otherwise.
  bool nccl = false;
};

/// Reads the option `backend`: "", "gloo", "shm", "nccl" (CPU tensors then go over Gloo), or one
/// for each device as in Python, "cpu:gloo,cuda:nccl". Nothing where it is none of these.
std::optional<BackendNames> parse_backend_names(const std::string& text);

/// What "" stands for here: NCCL beside Gloo where a GPU is visible and the plug-in is there, the
/// best of the CPU's otherwise.
std::string resolve_backend_name(const std::string& text);

}  // namespace ddp::detail
