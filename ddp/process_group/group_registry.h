#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/store_channel.h>

namespace ddp::detail {

/// One group of this process, and what must live as long as it.
struct Group {
  ProcessGroup process_group;
  std::shared_ptr<StoreChannel> channel;
  /// The store's server, or a store of the program's own; may be null.
  c10::intrusive_ptr<c10d::Store> server;
  /// Whether this rank waits for the others' good-byes.
  bool leaves_last = false;
  /// The group's ranks in the default group, ascending; empty for a group that the program made.
  std::vector<int> ranks;
  /// The backend that was asked for, or what "" stood for with a GPU; new groups ask for the same.
  std::string backend;
  /// The numeric address that connections are bound to.
  std::string address;
};

/// The process's groups. Its mutex guards all of it.
struct GroupRegistry {
  std::mutex mutex;
  ProcessGroup default_group;
  std::map<c10d::ProcessGroup*, Group> groups;
  /// How many default groups this process had before.
  std::uint64_t generation = 0;
  /// Python's counter of groups, and for each set of ranks the number of its groups.
  std::uint64_t group_count = 0;
  std::map<std::vector<int>, std::uint64_t> groups_of_ranks;
};

/// Never destroyed: what is left in it at exit is closed before LibTorch's own statics go.
GroupRegistry& group_registry();

/// `group`, or the default one where it is empty. Throws UsageError where there is none, and for
/// what new_group() gave a rank that is not a member.
ProcessGroup resolve_group(const ProcessGroup& group);

/// The channel between the C++ ranks of `group` (not empty). A group that the program made itself
/// gets one over its own store when first asked for, which every rank must then do.
/// Thread-safe. Throws UsageError where such a group has no store, or this rank is not a member.
std::shared_ptr<StoreChannel> channel_of(const ProcessGroup& group);

/// The backend that the default group asked for; without a group, what "" stands for here.
std::string default_backend_name();

/// What new_group() returns to a rank that is not a member.
ProcessGroup make_non_member(std::vector<int> ranks, int rank);

/// Whether `group` came from make_non_member.
bool is_non_member(const ProcessGroup& group);

}  // namespace ddp::detail
