#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/work.h>

// From one rank to another; <ddp/process_group/collectives.h> says what is common.

namespace ddp {

/// Options of `send`.
class SendOptions {
 public:
  /* implicit */ SendOptions(int dst) : dst_(dst) {}
  /// The rank in the group that receives.
  TORCH_ARG(int, dst);
  /// Pairs this with the `recv` of the same tag.
  TORCH_ARG(int, tag) = 0;
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `recv`.
class RecvOptions {
 public:
  RecvOptions() = default;
  /* implicit */ RecvOptions(int src) : src_(src) {}
  /// The rank in the group that sends; -1: whichever does first (`Work::source_rank` tells).
  TORCH_ARG(int, src) = -1;
  TORCH_ARG(int, tag) = 0;
  TORCH_ARG(bool, async_op) = false;
};

/// Sends `tensor`, contiguous, to rank `dst`, whose `recv` must have the same dtype and size.
/// Returns when the tensor may be changed again, which says nothing of its arrival.
///
///     if (ddp::get_rank() == 0) ddp::send(tensor, 1);
///     if (ddp::get_rank() == 1) ddp::recv(tensor, 0);
Work send(const at::Tensor& tensor, const SendOptions& options, const ProcessGroup& group = {});

/// Receives into `tensor`, contiguous.
Work recv(const at::Tensor& tensor, const RecvOptions& options = {},
          const ProcessGroup& group = {});

}  // namespace ddp
