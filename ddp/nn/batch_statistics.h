#pragma once

#include <ATen/core/Tensor.h>

#include <ddp/process_group/process_group.h>

namespace ddp::detail {

/// What a rank's backward will do at this layer.
enum class BackwardPart {
  kNone,        ///< no graph is recorded
  kParameters,  ///< gradients of weight or bias alone
  kInput,       ///< the input's gradient
};

/// Of the batch of all ranks, the same bits on each (given equal machines).
struct BatchStatistics {
  at::Tensor mean;      ///< a value a channel, double
  at::Tensor variance;  ///< biased, as `mean`
  double count = 0;     ///< values a channel
  /// Whether some rank needs all ranks' sums for its input's gradient: then all take part.
  bool reduces_in_backward = false;
};

/// One all-gather among the ranks of `group`. `input` is N x C x ..., and may be empty. Throws
/// UsageError on every rank where there are fewer than two values a channel, or where ranks without
/// a graph would leave the others alone in backward; CommunicationError.
BatchStatistics gather_batch_statistics(const at::Tensor& input, BackwardPart part,
                                        const ProcessGroup& group);

}  // namespace ddp::detail
