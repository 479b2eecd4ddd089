#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <launcher/descendants.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {
namespace {

using Clock = std::chrono::steady_clock;

/// A fork may slip between a look at /proc and the kill; nothing tells of it but the next look.
constexpr std::chrono::milliseconds kLookAgain{100};

bool read_process(int proc, const char* name, Process* process) {
  char path[sizeof(dirent::d_name) + sizeof("/stat")];
  std::snprintf(path, sizeof(path), "%s/stat", name);
  const UniqueFd fd(::openat(proc, path, O_RDONLY | O_CLOEXEC));
  if (!fd) return false;
  char text[512];
  const ssize_t size = ::read(fd.get(), text, sizeof(text) - 1);
  if (size <= 0) return false;
  text[size] = '\0';
  // "pid (name) state ppid ...", and the name may hold anything, also ") Z 1".
  const char* after_name = std::strrchr(text, ')');
  char state = 0;
  int parent = 0;
  if (after_name == nullptr || std::sscanf(after_name + 1, " %c %d", &state, &parent) != 2)
    return false;
  *process = {static_cast<pid_t>(std::atoi(name)), parent, state == 'Z' || state == 'X'};
  return true;
}

std::vector<Process> all_processes() {
  std::vector<Process> all;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), ::closedir);
  if (proc == nullptr) return all;
  while (const dirent* entry = ::readdir(proc.get())) {
    Process process;
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) != 0 &&
        read_process(::dirfd(proc.get()), entry->d_name, &process)) {
      all.push_back(process);
    }
  }
  return all;
}

void wait_for_child(std::chrono::milliseconds limit) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  const auto count = std::max<long long>(0, limit.count());
  const timespec timeout{static_cast<time_t>(count / 1000),
                         static_cast<long>(count % 1000) * 1000000};
  ::sigtimedwait(&child, nullptr, &timeout);
}

std::chrono::milliseconds until(Clock::time_point deadline) {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
}

}  // namespace

std::vector<Process> descendants_of(pid_t root, const std::vector<pid_t>& except) {
  std::vector<Process> all = all_processes();
  const auto by_parent = [](const Process& a, const Process& b) { return a.parent < b.parent; };
  std::sort(all.begin(), all.end(), by_parent);
  std::vector<Process> found;
  const auto add_children = [&](pid_t parent) {
    const auto [first, last] =
        std::equal_range(all.begin(), all.end(), Process{0, parent, false}, by_parent);
    std::copy_if(first, last, std::back_inserter(found), [&](const Process& process) {
      return std::find(except.begin(), except.end(), process.pid) == except.end();
    });
  };
  add_children(root);
  for (size_t i = 0; i < found.size(); ++i) add_children(found[i].pid);
  return found;
}

bool reap_children(const OnReaped& on_reaped) {
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid == 0) return true;
    if (pid > 0) {
      on_reaped(pid, status);
    } else if (errno != EINTR) {
      return false;
    }
  }
}

bool await_descendants(std::chrono::milliseconds limit, const OnReaped& on_reaped) {
  // A child subreaper is the parent of every orphan below it: no children, no descendants.
  const auto deadline = Clock::now() + limit;
  while (reap_children(on_reaped)) {
    if (Clock::now() >= deadline) return false;
    wait_for_child(until(deadline));
  }
  return true;
}

std::vector<pid_t> kill_descendants(std::chrono::milliseconds limit, const OnReaped& on_reaped,
                                    const std::vector<pid_t>& except) {
  const pid_t self = ::getpid();
  const auto deadline = Clock::now() + limit;
  std::vector<pid_t> dying;
  const auto note_death = [&](pid_t pid, int status) {
    dying.erase(std::remove(dying.begin(), dying.end(), pid), dying.end());
    on_reaped(pid, status);
  };
  while (reap_children(note_death)) {
    const std::vector<Process> left = descendants_of(self, except);
    if (left.empty() && !except.empty()) return {};
    dying.clear();
    for (const Process& process : left) {
      ::kill(process.pid, SIGKILL);
      if (process.parent == self) dying.push_back(process.pid);
    }
    if (Clock::now() >= deadline) {
      std::vector<pid_t> immortal;
      for (const Process& process : left) {
        if (!process.zombie) immortal.push_back(process.pid);
      }
      return immortal;
    }
    const auto look_again = std::min(deadline, Clock::now() + kLookAgain);
    do {
      wait_for_child(until(look_again));
      if (!reap_children(note_death)) return {};
    } while (!dying.empty() && Clock::now() < look_again);
  }
  return {};
}

}  // namespace ddp::launcher
