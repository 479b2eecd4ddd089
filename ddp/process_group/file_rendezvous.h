#pragma once

#include <cstdint>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/meeting_place.h>

namespace ddp::detail {

/// A store over a file that all ranks reach. Nobody waits here: Gloo does, when it connects.
///
/// c10d never notices that a file is left from a run that was killed, and would connect to ranks
/// that are gone. Each C++ rank therefore writes which process it is; one that finds its own rank
/// taken, or another rank's process dead, throws UsageError that names the file.
c10::intrusive_ptr<c10d::Store> meet_at_file(const MeetingPlace& place, std::uint64_t generation);

}  // namespace ddp::detail
