#pragma once

#include <chrono>
#include <cstdint>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/meeting_place.h>

namespace ddp::detail {

struct TcpMeeting {
  c10::intrusive_ptr<c10d::Store> client;
  /// Null where another process serves.
  c10::intrusive_ptr<c10d::Store> server;
  /// Whether the store stays when the group goes: an agent's (TORCHELASTIC_USE_AGENT_STORE).
  bool outlives_group = false;
};

/// `meet` over a TCP store. See Note [Who is there] in the source.
TcpMeeting meet_over_tcp(const MeetingPlace& place, std::uint64_t generation,
                         std::chrono::milliseconds timeout,
                         std::chrono::steady_clock::time_point deadline);

}  // namespace ddp::detail
