#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <ddp/process_group/store_channel.h>

namespace ddp::detail {

/// Ends a group on this rank, of whose members this one has taken leave already. One that is intact
/// lets its device work end first (NCCL's own end, which the other ranks come to as well), at most
/// `patience`; what then still runs is aborted, so that a rank that waits for this one hears of it.
/// Never throws.
void end_group(c10d::ProcessGroup& group, StoreChannel& channel,
               std::chrono::milliseconds patience);

}  // namespace ddp::detail
