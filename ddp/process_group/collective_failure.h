#pragma once

#include <string>

#include <ddp/process_group/store_channel.h>

namespace ddp::detail {

/// A collective that was begun has failed: leaves the group, so that ranks which wait for this one
/// end too, and throws CommunicationError with what is known of the others.
[[noreturn]] void fail_collective(StoreChannel& channel, const std::string& name,
                                  const std::string& why);

}  // namespace ddp::detail
