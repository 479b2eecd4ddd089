#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/spawn.h>

namespace ddp::launcher {
namespace {

/// Everything between fork and execve is async-signal-safe.
bool prepare(const SpawnRequest& request) {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (request.standard_fds[fd] >= 0 && ::dup2(request.standard_fds[fd], fd) < 0) return false;
  }
  if (request.keep_fd >= 0 && ::fcntl(request.keep_fd, F_SETFD, 0) != 0) return false;
  if (request.open_files != nullptr && ::setrlimit(RLIMIT_NOFILE, request.open_files) != 0)
    return false;
  return request.cpus == nullptr || ::sched_setaffinity(0, request.cpus_size, request.cpus) == 0;
}

[[noreturn]] void become_worker(const SpawnRequest& request, pid_t parent) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the line above.
  if (::getppid() != parent) ::_exit(127);
  if (prepare(request)) {
    request.signals->restore();
    ::execve(request.path, request.arguments, request.environment);
  }
  *request.error = errno;
  ::_exit(127);
}

}  // namespace

SharedErrors::SharedErrors(size_t count) : bytes_(count * sizeof(int)) {
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ExitStatus::kSetup, fmt::format("cannot map memory: {}", std::strerror(errno)));
  }
  errors_ = static_cast<int*>(memory);
}

SharedErrors::~SharedErrors() { ::munmap(errors_, bytes_); }

pid_t spawn(const SpawnRequest& request) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) become_worker(request, parent);
  return pid;
}

}  // namespace ddp::launcher
