#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace gloo::transport {
class Device;
}  // namespace gloo::transport

namespace ddp::detail {

using GlooDevices = std::vector<std::shared_ptr<gloo::transport::Device>>;

/// Gloo's devices on `address` (numeric), or on the interfaces in GLOO_SOCKET_IFNAME (separated by
/// commas) where that is set. Throws UsageError that names what cannot be used.
GlooDevices make_gloo_devices(int rank, const std::string& address);

/// Whether Gloo connects two ranks when they first talk to each other (TORCH_GLOO_LAZY_INIT).
bool gloo_connects_lazily();

/// What a GlooBackend is made of.
struct GlooSettings {
  int rank = -1;
  int world_size = -1;
  GlooDevices devices;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// The group's name, which the debug wrapper's store prefix holds.
  std::string name;
};

/// Of how many other ranks the connections are closed; 0 for a group whose backend is not ours.
int peers_gone(c10d::ProcessGroup& group);

/// A real c10d ProcessGroupGloo whose `abort()` closes the connections and ends the operations in
/// flight: peers see at once that this rank left.
///
/// Connects to every other rank: blocks until all have come. Throws what c10d throws where they do
/// not within the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const GlooSettings& settings);

/// `backend`; with TORCH_DISTRIBUTED_DEBUG=DETAIL wrapped, as in Python, in one that compares every
/// collective on all ranks before it begins. That connects the ranks once more.
c10::intrusive_ptr<c10d::Backend> checked(const c10::intrusive_ptr<c10d::Backend>& backend,
                                          const c10::intrusive_ptr<c10d::Store>& store,
                                          const GlooSettings& settings);

}  // namespace ddp::detail
