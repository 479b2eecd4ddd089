#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp::detail {

/// Where the ranks meet: a store that all of them reach, and who this rank is.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = -1;
  int world_size = -1;
  /// The numeric address that this rank's connections to the others are bound to.
  std::string address;
  /// Whether the store lives in this process, which then leaves last.
  bool serves_store = false;
};

/// Meets the other ranks at `url`: `env://` (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
/// `tcp://host:port?rank=R&world_size=W` or `file:///path?rank=R&world_size=W`, as Python does.
/// `rank` and `world_size` (-1: not given) stand for the address's query. Rank 0 serves the TCP
/// store and waits there for all ranks.
///
/// `generation` counts this process's earlier meetings: a rank that comes back after
/// destroy_process_group() does not take the store that is about to close for the new one.
///
/// Throws UsageError (malformed address or variable, unknown host, port in use, rank out of range)
/// or CommunicationError (the others did not come within `timeout`).
Rendezvous rendezvous(const std::string& url, int rank, int world_size, std::uint64_t generation,
                      std::chrono::milliseconds timeout);

}  // namespace ddp::detail
