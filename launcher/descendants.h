#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <vector>

namespace ddp::launcher {

struct Process {
  pid_t pid;
  pid_t parent;
  bool zombie;
};

/// All living descendants of the process `root`, parents before their children, without the trees
/// under the processes `except`. A snapshot of /proc: what is forked meanwhile is not in it.
std::vector<Process> descendants_of(pid_t root, const std::vector<pid_t>& except = {});

/// Called with each child that was reaped on the way: its pid and its status as wait gives it.
using OnReaped = std::function<void(pid_t pid, int status)>;

/// Reaps every child that has ended; false once there is no child at all any more.
bool reap_children(const OnReaped& on_reaped);

/// Waits until this process, a child subreaper, has no descendant left, but no longer than `limit`.
/// SIGCHLD must be blocked. Returns whether none is left.
bool await_descendants(std::chrono::milliseconds limit, const OnReaped& on_reaped);

/// Kills every descendant of this process, a child subreaper, and those that they fork meanwhile,
/// until none is left. SIGCHLD must be blocked. Gives up on processes that cannot be killed (stuck
/// in the kernel, of another user) after `limit`, and returns these. The trees under `except`,
/// which must be children of this process, are left alone.
std::vector<pid_t> kill_descendants(std::chrono::milliseconds limit, const OnReaped& on_reaped,
                                    const std::vector<pid_t>& except = {});

}  // namespace ddp::launcher
