#include <cstddef>
#include <functional>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <string>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <test/support/catch2.h>
#include <unistd.h>

#include <ddp/process_group/shm/arena.h>
#include <ddp/process_group/shm/offer.h>
#include <ddp/process_group/shm/shm_error.h>

// What a sandbox takes from a process that would share memory.

using ddp::shm::Arena;
using ddp::shm::Offer;
using ddp::shm::ShmError;

namespace {

/// What `act` throws in a forked process, "nothing" where it does not; "no sandbox" where
/// `confine` cannot be had on this machine.
std::string error_in_sandbox(const std::function<bool()>& confine,
                             const std::function<void()>& act) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    std::string text = "nothing";
    if (!confine()) {
      text = "no sandbox";
    } else {
      try {
        act();
      } catch (const ShmError& error) {
        text = error.what();
      }
    }
    _exit(write(ends[1], text.data(), text.size()) < 0 ? 1 : 0);
  }
  close(ends[1]);
  std::string text(1000, ' ');
  const auto length = read(ends[0], text.data(), text.size());
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  REQUIRE(length > 0);
  text.resize(static_cast<std::size_t>(length));
  if (text == "no sandbox") {
    WARN("this machine gives no sandbox: skipped");
  }
  return text;
}

bool refuse_system_call(unsigned int number) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool hide_proc() {
  return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
         mount("none", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=4k") == 0;
}

bool is_told(const std::string& text, const std::string& part) {
  INFO(text);
  return text == "no sandbox" || text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("where the system gives no random numbers, no memory is shared") {
  const auto text =
      error_in_sandbox([] { return refuse_system_call(SYS_getrandom); }, [] { const Arena arena; });
  CHECK(is_told(text, "the system gives no random numbers"));
}

TEST_CASE("where /proc is not there, no memory is shared") {
  // The arena needs /proc for the memory that is left, and comes first.
  const Arena arena;
  const auto text = error_in_sandbox(hide_proc, [&] { Offer::of_this_process(arena); });
  CHECK(is_told(text, "/proc does not tell this process's machine"));
}
