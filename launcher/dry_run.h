#pragma once

#include <string>

#include <launcher/job.h>

namespace ddp::launcher {

/// The text of `--dry-run`: for each worker the variables that the launcher would set, and the
/// command, in a form that a shell understands.
std::string describe_job(const Job& job, const char* const* inherited);

}  // namespace ddp::launcher
