#pragma once

#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp::detail {

/// A real c10d ProcessGroupGloo whose connections are bound to `address` (numeric), or to the
/// interfaces in GLOO_SOCKET_IFNAME (separated by commas) where that is set. Its `abort()` closes
/// the connections, so that peers see at once that this rank left.
///
/// Connects to every other rank: blocks until all have come, or throws CommunicationError after
/// `timeout`.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    const std::string& address,
                                                    std::chrono::milliseconds timeout);

}  // namespace ddp::detail
