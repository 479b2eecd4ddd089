#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include <launcher/worker.h>

namespace ddp::launcher {

/// Puts the failures of an attempt in order, the root cause first. `failures`: the workers that
/// ended badly of their own, in the order of their ends. A worker may need time between its error
/// and its end, and lose the race to those that it has let down; so who surely failed before the
/// first of them, by the time in its error file, comes before it. `stopped_at`: when the launcher
/// told the others to end. One of them that had surely failed before that is a failure as well, and
/// no longer counts as stopped. Without failures nothing changes.
void order_failures(std::vector<Worker>& workers, std::vector<size_t>& failures,
                    std::chrono::system_clock::time_point stopped_at);

/// The exit status of a job with these failures: the root cause's own, or, where the launcher's
/// signal ended that one after its error, that of the first that ended of its own.
int failure_status(const std::vector<Worker>& workers, const std::vector<size_t>& failures);

}  // namespace ddp::launcher
