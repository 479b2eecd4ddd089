// Finding programs, and finding and ending processes.

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include <launcher/descendants.h>
#include <launcher/error.h>
#include <launcher/program.h>

#include "catch2.h"

using namespace ddp::launcher;

namespace {

/// A folder with a program `tool`, and PATH set to it.
class ToolFolder {
 public:
  ToolFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "launch-unit-XXXXXX";
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
    add("tool", 0755);
    const char* path = ::getenv("PATH");
    old_path_ = path != nullptr ? path : "";
    ::setenv("PATH", ("/nonexistent:" + path_).c_str(), 1);
  }
  ~ToolFolder() {
    ::setenv("PATH", old_path_.c_str(), 1);
    std::filesystem::remove_all(path_);
  }
  void add(const std::string& name, mode_t mode) const {
    const std::string file = path_ + "/" + name;
    std::ofstream(file) << "#!/bin/sh\n";
    REQUIRE(::chmod(file.c_str(), mode) == 0);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string old_path_;
};

int status_for(const std::string& program) {
  try {
    find_program(program);
  } catch (const Error& error) {
    CHECK_THAT(error.what(), ContainsSubstring(program));
    return error.status();
  }
  return 0;
}

}  // namespace

TEST_CASE("a program is found by its path, in PATH, and in the current folder") {
  const ToolFolder folder;
  CHECK(find_program("tool") == folder.path() + "/tool");
  CHECK(find_program(folder.path() + "/tool") == folder.path() + "/tool");
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  folder.add("here", 0755);
  ::setenv("PATH", "/nonexistent", 1);
  CHECK(find_program("here") == "./here");
  std::filesystem::current_path(before);
}

TEST_CASE("a program that cannot be run is refused") {
  const ToolFolder folder;
  folder.add("data", 0644);
  CHECK(status_for("no-such-tool") == 127);
  CHECK(status_for(folder.path() + "/none") == 127);
  CHECK(status_for(folder.path() + "/tool/none") == 127);
  CHECK(status_for(folder.path()) == 126);
  CHECK(status_for(folder.path() + "/data") == 126);
  CHECK(status_for("data") == 126);
  CHECK(status_for("") == 127);
}

TEST_CASE("all descendants are found and ended, orphans included") {
  // In a process of its own: it becomes a subreaper and kills all that is below it.
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &child, nullptr);
    int ready[2];
    if (::pipe(ready) != 0) ::_exit(1);
    const pid_t kept = ::fork();
    if (kept == 0) {
      ::pause();
      ::_exit(0);
    }
    if (::fork() == 0) {    // a child,
      if (::fork() == 0) {  // whose child is orphaned,
        ::setsid();
        ::prctl(PR_SET_NAME, "a) Z 1 (b");  // with a name made to confuse,
        if (::fork() == 0) {                // and has one itself
          if (::write(ready[1], "x", 1) != 1) ::_exit(1);
        }
        ::pause();
      }
      ::_exit(0);
    }
    char byte = 0;
    if (::read(ready[0], &byte, 1) != 1) ::_exit(2);
    if (::waitpid(-1, nullptr, 0) <= 0) ::_exit(3);
    if (descendants_of(::getpid()).size() != 3) ::_exit(4);
    if (descendants_of(::getpid(), {kept}).size() != 2) ::_exit(5);
    int reaped = 0;
    const auto count = [&](pid_t, int) { ++reaped; };
    if (!kill_descendants(std::chrono::seconds(30), count, {kept}).empty()) ::_exit(6);
    const auto left = descendants_of(::getpid());
    if (left.size() != 1 || left[0].pid != kept) ::_exit(7);
    if (await_descendants(std::chrono::milliseconds(1), count)) ::_exit(8);
    if (!kill_descendants(std::chrono::seconds(30), count).empty()) ::_exit(9);
    if (!await_descendants(std::chrono::seconds(30), count) || reaped != 3) ::_exit(10);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
