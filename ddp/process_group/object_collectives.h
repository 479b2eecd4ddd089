#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <ddp/process_group/gather.h>
#include <ddp/process_group/process_group.h>

// Collectives on what is no tensor: strings, and what a torch::IValue holds (numbers, strings,
// tensors, lists, tuples, dictionaries). Objects may differ in size between the ranks.
// <ddp/process_group/collectives.h> says what is common; these always wait (async_op is refused).
//
// IValues travel in TorchScript's pickle format (torch::pickle_save). Ranks in Python cannot read
// it: these calls are for C++ ranks. A UsageError where a string meets an IValue. As with every
// pickle, only receive from ranks that you trust.

namespace ddp {

/// Returns rank `src`'s object, on every rank; the others' are not looked at.
///
///     const auto run_name = ddp::broadcast_object(std::string(ddp::get_rank() == 0 ? make_name() :
///     ""));
std::string broadcast_object(const std::string& object, const BroadcastOptions& options = {},
                             const ProcessGroup& group = {});
c10::IValue broadcast_object(const c10::IValue& object, const BroadcastOptions& options = {},
                             const ProcessGroup& group = {});

/// Returns every rank's object, in the order of the ranks.
std::vector<std::string> all_gather_object(const std::string& object,
                                           const ProcessGroup& group = {});
std::vector<c10::IValue> all_gather_object(const c10::IValue& object,
                                           const ProcessGroup& group = {});

/// The same on rank `dst` alone; elsewhere the list is empty.
std::vector<std::string> gather_object(const std::string& object, const GatherOptions& options = {},
                                       const ProcessGroup& group = {});
std::vector<c10::IValue> gather_object(const c10::IValue& object, const GatherOptions& options = {},
                                       const ProcessGroup& group = {});

/// Returns rank `src`'s objects[r] on rank r. The others' lists must be empty.
std::string scatter_object(const std::vector<std::string>& objects,
                           const ScatterOptions& options = {}, const ProcessGroup& group = {});
c10::IValue scatter_object(const std::vector<c10::IValue>& objects,
                           const ScatterOptions& options = {}, const ProcessGroup& group = {});

}  // namespace ddp
