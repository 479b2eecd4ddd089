#pragma once

#include <chrono>
#include <cstdint>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/meeting_place.h>

namespace ddp::detail {

/// The store at which the ranks have met.
struct Rendezvous {
  /// Python's prefix for a store that came from an address ("default_pg") is on it already.
  c10::intrusive_ptr<c10d::Store> store;
  /// Must live as long as the group: the store's server where it runs in this process.
  c10::intrusive_ptr<c10d::Store> server;
  /// Whether this rank leaves last, as the others need its store.
  bool leaves_last = false;
};

/// Meets the other ranks at `place`. Rank 0 serves a TCP store and waits there for all ranks, and
/// the others (where rank 0 is a C++ rank) for its word that all have come; at a file nobody waits.
///
/// `generation` counts the groups that this process had before: a rank that comes back after
/// destroy_process_group() does not take the store that is about to close, or a store's old
/// entries, for the new one.
///
/// Throws UsageError (port in use, a rank that is there already, a stale file) or
/// CommunicationError (the others did not come by `deadline`, and which); nothing is left open
/// then. A store that does not answer at all must be ended by the caller's StoreDeadline.
Rendezvous meet(const MeetingPlace& place, std::uint64_t generation,
                std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point deadline);

/// A store of the program's own as a meeting point.
Rendezvous meet_at(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                   std::uint64_t generation);

}  // namespace ddp::detail
