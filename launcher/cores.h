#pragma once

namespace ddp::launcher {

/// The number of cores that this process may use (its affinity), at least 1.
int available_cores();

}  // namespace ddp::launcher
