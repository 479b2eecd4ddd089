#pragma once

#include <ATen/core/Tensor.h>

#include <ddp/nn/batch_statistics.h>
#include <ddp/process_group/process_group.h>

namespace ddp::detail {

/// Normalises `input` (N x C x ..., contiguous in its memory format; may be empty) with the
/// statistics of the batch of all ranks, of which it is this rank's part; `weight` and `bias` may
/// be undefined. The result has the input's dtype and memory format.
///
/// Its backward all-reduces two sums a channel where `statistics.reduces_in_backward`, and throws
/// CommunicationError; the gradients of weight and bias are this rank's own. A second derivative
/// throws UsageError.
at::Tensor normalize_synchronized(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const BatchStatistics& statistics,
                                  double eps, const ProcessGroup& group);

}  // namespace ddp::detail
