#pragma once

#include <cstdint>

namespace ddp::shm {

/// How many bytes this process can still take without the system having to end one: of the machine,
/// and of the control group (container) where that has a limit. 0 where the system does not tell.
///
/// Shared memory is taken for good when it is reserved, and the system's answer to too much of it
/// is not an error but the end of some process.
std::uint64_t available_memory();

}  // namespace ddp::shm
