#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <ddp/process_group/process_group.h>
#include <ddp/reducer/failure_channel.h>

namespace ddp::detail {

/// Gives the values of `tensors` that rank `root` of the group has to all ranks, in messages of
/// about 250 MiB, one dtype and device each: Python's `_sync_module_states`
/// (nn/parallel/distributed.py, utils.py) and c10d's `broadcast_coalesced`, byte for byte on the
/// wire. The tensors are dense, detached, alike on all ranks. Throws what the backend throws; see
/// `watched_wait`.
void broadcast_tensors(c10d::ProcessGroup& group, FailureChannel* channel,
                       const std::vector<at::Tensor>& tensors, int root = 0);

}  // namespace ddp::detail
