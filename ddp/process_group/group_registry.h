#pragma once

#include <memory>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/store_channel.h>

namespace ddp::detail {

/// `group`, or the default one where it is empty. Throws UsageError where there is none.
ProcessGroup resolve_group(const ProcessGroup& group);

/// The channel between the C++ ranks of `group` (not empty). A group that the program made itself
/// gets one over its own store when first asked for, which every rank must then do.
/// Thread-safe. Throws UsageError where such a group has no store.
std::shared_ptr<StoreChannel> channel_of(const ProcessGroup& group);

}  // namespace ddp::detail
