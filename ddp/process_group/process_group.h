#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// A group of ranks that communicate: c10d's own type. An empty one means the default group.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Options of `init_process_group`.
class InitProcessGroupOptions {
 public:
  InitProcessGroupOptions() = default;
  /* implicit */ InitProcessGroupOptions(std::string backend) : backend_(std::move(backend)) {}
  /* implicit */ InitProcessGroupOptions(const char* backend) : backend_(backend) {}

  /// "gloo", "shm" (shared memory, ranks of one machine), "nccl" (GPUs), "cpu:gloo,cuda:nccl" and
  /// the like, or "": the best one here. The same on all ranks.
  TORCH_ARG(std::string, backend);
  /// Where the ranks meet: `env://` (what the launcher sets), `tcp://host:port`, `file:///path`.
  TORCH_ARG(std::string, init_method);
  /// This process's rank and the number of ranks; -1: from the environment or the address's query.
  TORCH_ARG(int, rank) = -1;
  TORCH_ARG(int, world_size) = -1;
  /// Bound of every wait: for the others to come, and of each collective.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  /// A store of the program's own, in place of `init_method`; needs `rank` and `world_size`.
  TORCH_ARG(c10::intrusive_ptr<c10d::Store>, store);
};

/// Makes the default process group. Every rank calls it once, before anything else of ddp; it
/// returns when all ranks have come.
///
/// Not thread-safe. Throws UsageError (a missing or malformed variable, a rank out of range, a port
/// in use, an unknown host, a second call) or CommunicationError (a rank did not come within
/// `timeout`); then no group exists, and nothing is left open.
///
/// Ignores SIGPIPE from then on, unless the program handles it: Gloo writes to connections whose
/// peer may have left.
///
///     ddp::init_process_group();                          // as `launch` set the environment
///     ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(std::chrono::seconds(60)));
void init_process_group(const InitProcessGroupOptions& options = {});

/// Options of `new_group`.
class NewGroupOptions {
 public:
  /// As of `InitProcessGroupOptions`; "": what the default group asked for.
  TORCH_ARG(std::string, backend);
  /// Bound of each collective of the group, and of the wait for its members; 0: the default
  /// group's.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

/// Makes a group of some of the default group's ranks (all of them where `ranks` is empty), with
/// connections of its own: its collectives and the default group's do not mix. Within the group the
/// members are numbered from 0 in ascending order of `ranks`, however the list was ordered.
///
/// Every rank of the default group may call it; a rank that is not a member gets a group that
/// `is_member` tells, whose `get_rank` is -1, and that all other functions refuse. It returns when
/// all members have called it, so members that share several groups make those in the same order;
/// apart from that, and in a job of C++ ranks alone, the order is free and non-members need not
/// call it. (In a job with Python ranks, all ranks make all groups in the same order, as Python
/// demands.)
///
/// Not thread-safe. Throws UsageError (no default group, a rank out of range or twice) or
/// CommunicationError (a member did not come within the timeout; its rank is named).
///
///     const auto evens = ddp::new_group({0, 2});
///     if (ddp::is_member(evens)) ddp::all_reduce(tensor, {}, evens);
ProcessGroup new_group(std::vector<int> ranks, const NewGroupOptions& options = {});

/// Whether this process is one of the group's ranks: false only for what `new_group` gave a rank
/// that is not.
bool is_member(const ProcessGroup& group);

/// The group's ranks, as ranks of the default group, ascending.
std::vector<int> get_process_group_ranks(const ProcessGroup& group = {});

/// Between ranks of the default group and ranks in `group`. Throws UsageError for a rank that is
/// not in the group.
int get_group_rank(const ProcessGroup& group, int global_rank);
int get_global_rank(const ProcessGroup& group, int group_rank);

/// Closes all groups, the default one included (or `group` alone, where one is given). Every rank
/// calls it at its end; init_process_group() may follow.
///
/// The rank whose process serves the store leaves last: it waits until every C++ rank has called
/// this (at most the group's timeout and 5 minutes; a few seconds where the group has failed).
/// Without a group it does nothing. Not thread-safe; never throws for what the other ranks do.
void destroy_process_group(const ProcessGroup& group = {});

/// Whether the default group exists.
bool is_initialized();

/// The default group. Throws UsageError where there is none.
ProcessGroup default_group();

/// This process's rank in `group`, from 0 to get_world_size() - 1; -1 where it is not a member.
/// Throws UsageError without a group.
int get_rank(const ProcessGroup& group = {});

/// The number of ranks in `group`; -1 where this process is not a member. Throws UsageError without
/// a group.
int get_world_size(const ProcessGroup& group = {});

/// The name of the group's backend: "gloo", "shm" or "nccl".
std::string get_backend(const ProcessGroup& group = {});

/// This process's number on its node, from LOCAL_RANK; 0 where that is not set.
/// Throws UsageError where the variable is malformed.
int local_rank();

/// The number of this job's processes on this node, from LOCAL_WORLD_SIZE; 1 where that is not set.
int local_world_size();

/// The device that this rank trains on: cuda:LOCAL_RANK with NCCL, made current; else the CPU.
c10::Device local_device();

}  // namespace ddp
