#pragma once

#include <string>
#include <vector>

#include <launcher/worker.h>

namespace ddp::launcher {

/// "exited with code 7", "was killed by SIGSEGV (core dumped)".
std::string describe_end(const Worker& worker);

/// What is said when a worker failed. `failures` are the indices of the workers that ended badly of
/// their own, as order_failures gives them: the first is the root cause. Workers that the launcher
/// stopped are listed as such and are never shown as failures. `ending` is the last line; empty:
/// the exit status.
std::string failure_report(const std::vector<Worker>& workers, const std::vector<size_t>& failures,
                           const std::string& host, const std::string& program,
                           const std::string& ending = "");

/// What is said when the launcher ended the job: `why`, "stopped by SIGTERM", and with what status.
std::string stop_report(const std::vector<Worker>& workers, const std::string& why, int status);

}  // namespace ddp::launcher
