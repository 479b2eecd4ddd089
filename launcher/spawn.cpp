#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include <launcher/spawn.h>

namespace ddp::launcher {
namespace {

/// Runs in the child, on the parent's memory: system calls only.
[[noreturn]] void become_worker(const SpawnRequest& request, pid_t parent, volatile int* error) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (::getppid() != parent) ::_exit(127);
  if ((request.stdin_fd < 0 || ::dup2(request.stdin_fd, STDIN_FILENO) >= 0) &&
      (request.keep_fd < 0 || ::fcntl(request.keep_fd, F_SETFD, 0) == 0)) {
    request.signals->restore();
    ::execve(request.path, request.arguments, request.environment);
  }
  *error = errno;
  ::_exit(127);
}

/// vfork alone in a function, so that no variable of another one can be clobbered by it.
[[gnu::noinline]] pid_t vfork_worker(const SpawnRequest& request, pid_t parent,
                                     volatile int* error) {
  const pid_t pid = ::vfork();
  if (pid == 0) become_worker(request, parent, error);
  return pid;
}

}  // namespace

pid_t spawn(const SpawnRequest& request) {
  volatile int exec_error = 0;
  const pid_t pid = vfork_worker(request, ::getpid(), &exec_error);
  if (pid > 0 && exec_error != 0) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    errno = exec_error;
    return -1;
  }
  return pid;
}

}  // namespace ddp::launcher
