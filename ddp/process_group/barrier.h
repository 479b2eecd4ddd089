#pragma once

#include <chrono>

#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/work.h>

// Collectives without data; <ddp/process_group/collectives.h> says what is common.

namespace ddp {

/// Options of `barrier`.
class BarrierOptions {
 public:
  TORCH_ARG(bool, async_op) = false;
};

/// Options of `monitored_barrier`.
class MonitoredBarrierOptions {
 public:
  MonitoredBarrierOptions() = default;
  /* implicit */ MonitoredBarrierOptions(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  /// 0: the group's.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
  /// Whether rank 0 waits for all, and names every missing rank, or ends with the first.
  TORCH_ARG(bool, wait_all_ranks) = true;
};

/// Returns when every rank of the group has called it.
void barrier(const ProcessGroup& group = {});
Work barrier(const BarrierOptions& options, const ProcessGroup& group = {});

/// The same, slower, and with a CommunicationError that names the ranks that did not come within
/// the timeout: on rank 0 of the group; the others are told to look there. Gloo only.
///
///     ddp::monitored_barrier(std::chrono::seconds(30));
void monitored_barrier(const MonitoredBarrierOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp
