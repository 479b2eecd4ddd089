#pragma once

#include <launcher/job.h>

namespace ddp::launcher {

/// Runs the job to its end and returns the launcher's exit status. `argc` and `argv` are main's:
/// the guardian process overwrites its copy, so that it goes by a name of its own.
int run_job(Job job, int argc, char** argv);

}  // namespace ddp::launcher
