#pragma once

#include <string>

#include <launcher/job.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// Runs this node's agent until the job is over or the launcher has gone, see Note [Agent].
/// `plugin` is the store's library, `link` the socket to the launcher (see agent_messages.h). To be
/// called in a process of its own, which ends afterwards.
void run_agent(const Job& job, const std::string& plugin, UniqueFd link);

}  // namespace ddp::launcher
