#include <sys/wait.h>

#include <launcher/worker.h>

namespace ddp::launcher {

void Worker::ended_with(int wait_status) {
  ended = std::chrono::system_clock::now();
  if (WIFSIGNALED(wait_status)) {
    end = End::kSignaled;
    code = WTERMSIG(wait_status);
    core_dumped = WCOREDUMP(wait_status);
  } else {
    end = End::kExited;
    code = WEXITSTATUS(wait_status);
  }
}

}  // namespace ddp::launcher
