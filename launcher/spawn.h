#pragma once

#include <sched.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <launcher/signals.h>

namespace ddp::launcher {

/// What a new worker process gets.
struct SpawnRequest {
  const char* path;
  char* const* arguments;
  char* const* environment;
  const SignalTakeover* signals;
  int* error;  ///< in SharedErrors: set where it could not be executed
  /// What becomes its standard input, output and error; -1: the launcher's own.
  int standard_fds[3] = {-1, -1, -1};
  int keep_fd = -1;                    ///< stays open in it; -1: none
  const rlimit* open_files = nullptr;  ///< its limit on open files; null: the launcher's own
  const cpu_set_t* cpus = nullptr;     ///< where it may run; null: as the launcher
  size_t cpus_size = 0;                ///< bytes of `cpus`
};

/// One error number for each worker, in memory that is shared with the new processes: what a worker
/// that could not be executed says about it before it exits with 127.
class SharedErrors {
 public:
  explicit SharedErrors(size_t count);
  SharedErrors(const SharedErrors&) = delete;
  SharedErrors& operator=(const SharedErrors&) = delete;
  ~SharedErrors();

  int& operator[](size_t index) { return errors_[index]; }

 private:
  size_t bytes_;
  int* errors_;
};

/// Starts a process as the leader of a session of its own: a terminal's ^C then reaches the
/// launcher alone, which passes it on, and one signal to the group reaches what the worker has
/// started. It is killed when the calling process dies. Does not wait for it: a vfork would, and on
/// a busy machine each wait for another process costs more than all the copying of a fork. So for a
/// moment it is not yet the leader of its group. Returns its process id, or -1 with errno set.
pid_t spawn(const SpawnRequest& request);

}  // namespace ddp::launcher
