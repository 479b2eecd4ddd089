#pragma once

#include <sys/types.h>

#include <launcher/signals.h>

namespace ddp::launcher {

/// What a new worker process gets.
struct SpawnRequest {
  const char* path;
  char* const* arguments;
  char* const* environment;
  const SignalTakeover* signals;
  int stdin_fd = -1;  ///< becomes its standard input; -1: the launcher's own
  int keep_fd = -1;   ///< stays open in it; -1: none
};

/// Starts a process as the leader of a session of its own: a terminal's ^C then reaches the
/// launcher alone, which passes it on, and one signal to the group reaches what the worker has
/// started. It is killed when the calling process dies. Costs a vfork: nothing of the launcher is
/// copied. Returns its process id, or -1 with errno set, also where the program could not be
/// executed.
pid_t spawn(const SpawnRequest& request);

}  // namespace ddp::launcher
