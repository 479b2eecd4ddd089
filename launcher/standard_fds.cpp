#include <fcntl.h>
#include <unistd.h>

#include <launcher/standard_fds.h>

namespace ddp::launcher {

void fill_standard_fds() {
  while (true) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) return;
    if (fd > STDERR_FILENO) {
      ::close(fd);
      return;
    }
  }
}

void release_standard_input() {
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  ::dup2(fd, STDIN_FILENO);
  ::close(fd);
}

}  // namespace ddp::launcher
