#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddp/process_group/file_rendezvous.h>
#include <ddp/process_group/rendezvous.h>
#include <ddp/process_group/store_sockets.h>
#include <ddp/process_group/tcp_rendezvous.h>

namespace ddp::detail {
namespace {

/// A store that outlives a group still holds that group's entries; the next group gets a prefix of
/// its own. The first one has Python's, so that a job may mix Python and C++ ranks.
c10::intrusive_ptr<c10d::Store> prefixed(const char* prefix,
                                         const c10::intrusive_ptr<c10d::Store>& store,
                                         std::uint64_t generation) {
  const auto name =
      generation == 0 ? std::string(prefix) : fmt::format("{}/again{}", prefix, generation);
  if (name.empty()) {
    return store;
  }
  return c10::make_intrusive<c10d::PrefixStore>(name, store);
}

}  // namespace

Rendezvous meet(const MeetingPlace& place, std::uint64_t generation,
                std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point deadline) {
  constexpr const char* kPrefix = "default_pg";
  if (place.kind == MeetingPlace::Kind::kFile) {
    return {prefixed(kPrefix, meet_at_file(place, generation), generation), nullptr, false};
  }
  const auto met = meet_over_tcp(place, generation, timeout, deadline);
  return {prefixed(kPrefix, met.client, met.outlives_group ? generation : 0), met.server,
          place.rank == 0};
}

Rendezvous meet_at(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                   std::uint64_t generation) {
  // A connection of the group's own: the program's may be in use, and a StoreDeadline may end ours.
  const auto own = tcp_port_of(store) ? store->clone() : store;
  return {prefixed("", own, generation), store, rank == 0};
}

}  // namespace ddp::detail
