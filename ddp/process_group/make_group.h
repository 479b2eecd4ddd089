#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/group_registry.h>

namespace ddp::detail {

/// Who makes which group, over which store.
struct GroupPlan {
  /// The parent group's store, or the default group's as the ranks met at it.
  c10::intrusive_ptr<c10d::Store> store;
  /// The group's name: its prefix on the store, "0" for the default group as in Python.
  std::string name;
  std::string description;
  /// This process's rank in the group, and the group's ranks as ranks of the default group.
  int rank = -1;
  std::vector<int> ranks;
  /// As of InitProcessGroupOptions, known to be right.
  std::string backend;
  GlooDevices devices;
  std::string address;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point deadline;
  /// The place of the store, for errors.
  std::string where;
};

/// Connects the group's ranks. Throws CommunicationError that names the ranks that did not come, or
/// says that the store does not answer; then nothing is left open.
Group make_group(const GroupPlan& plan);

}  // namespace ddp::detail
