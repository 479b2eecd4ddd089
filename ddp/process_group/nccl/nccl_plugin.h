#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

// What lies in libddp_nccl.so: all that needs LibTorch's CUDA half. ddp::ddp opens it when CUDA is
// asked for, and a program that never asks runs without CUDA's libraries.

namespace ddp::detail {

/// What an NCCL backend is made of.
struct NcclSettings {
  int rank = -1;
  int world_size = -1;
  /// The group's name, and its ranks as ranks of the default group.
  std::string name;
  std::vector<int> ranks;
  int device = 0;
  std::chrono::milliseconds timeout;
};

/// The plug-in's side; one object, which lives as long as the process. Thread-safe.
class NcclPlugin {
 public:
  virtual ~NcclPlugin() = default;

  /// Makes the CUDA device number `device` the calling thread's current one, and its context.
  /// Throws std::exception with CUDA's own words.
  virtual void set_device(int device) const = 0;

  /// A real c10d ProcessGroupNCCL that never ends the process: where an operation fails, the
  /// communicators are aborted, and the works' result futures say so. Connects when first used.
  virtual c10::intrusive_ptr<c10d::Backend> make_backend(
      const c10::intrusive_ptr<c10d::Store>& store, const NcclSettings& settings) const = 0;

  /// Whether the calling thread's current stream is being captured into a CUDA graph.
  virtual bool is_capturing() const = 0;
};

/// Which builds fit together: the plug-in and the library that opens it, of one LibTorch.
inline constexpr const char* kNcclPluginBuild = "1, LibTorch " TORCH_VERSION;

/// The plug-in's two C functions.
inline constexpr const char* kNcclPluginBuildName = "ddp_nccl_plugin_build";
inline constexpr const char* kNcclPluginName = "ddp_nccl_plugin";
using NcclPluginBuildFunction = const char* (*)();
using NcclPluginFunction = const NcclPlugin* (*)();

}  // namespace ddp::detail
