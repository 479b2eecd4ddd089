#pragma once

#include <vector>

namespace ddp::launcher {

/// The number of cores that this process may use (its affinity), at least 1.
int available_cores();

/// Their numbers, in ascending order.
std::vector<int> allowed_cores();

}  // namespace ddp::launcher
