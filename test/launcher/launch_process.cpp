#include "launch_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include <launcher/descendants.h>

#include "catch2.h"

namespace ddp::launcher::test {
namespace {

using Clock = std::chrono::steady_clock;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string make_folder() {
  const char* base = std::getenv("TMPDIR");
  std::string pattern = std::string(base != nullptr ? base : "/tmp") + "/launch-test-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp: " + pattern);
  return pattern;
}

void redirect(const std::string& path, int flags, int to) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  if (fd < 0 || ::dup2(fd, to) < 0) ::_exit(120);
}

}  // namespace

void await(const char* what, const std::function<bool()>& condition,
           std::chrono::seconds patience) {
  const auto deadline = Clock::now() + patience;
  while (!condition()) {
    if (Clock::now() >= deadline) FAIL("waited in vain until " << what);
    const timespec pause{0, 2000000};
    ::nanosleep(&pause, nullptr);
  }
}

LaunchProcess::LaunchProcess(const std::vector<std::string>& arguments, const Setup& setup)
    : folder_(make_folder()), mark_("DDP_LAUNCH_TEST=" + folder_) {
  std::vector<std::string> words = setup.run_through;
  words.push_back(std::string(DDP_LAUNCH_FOLDER "/") + setup.name);
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  write("stdin", setup.input);

  started_ = Clock::now();
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::setpgid(0, 0);
    // A test that is killed takes its launcher with it, and that its workers.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(120);
    redirect(folder_ + "/stdin", O_RDONLY, STDIN_FILENO);
    redirect(folder_ + "/stdout", O_WRONLY | O_CREAT | O_APPEND, STDOUT_FILENO);
    redirect(folder_ + "/stderr", O_WRONLY | O_CREAT | O_APPEND, STDERR_FILENO);
    for (const char* name :
         {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}) {
      ::unsetenv(name);
    }
    ::setenv("DDP_LAUNCH_TEST", folder_.c_str(), 1);
    ::setenv("DIR", folder_.c_str(), 1);
    for (const auto& [name, value] : setup.environment) ::setenv(name.c_str(), value.c_str(), 1);
    if (setup.before_exec) setup.before_exec();
    ::execv(argv[0], argv.data());
    ::_exit(121);
  }
  if (pid_ < 0) throw std::runtime_error("fork");
  ::setpgid(pid_, pid_);
}

LaunchProcess::~LaunchProcess() {
  if (!ended_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

pid_t LaunchProcess::guardian() const {
  pid_t found = 0;
  await("the launcher has its guardian", [&] {
    for (const Process& process : descendants_of(pid_)) {
      const std::string name = read_file("/proc/" + std::to_string(process.pid) + "/comm");
      if (process.parent == pid_ && name == "ddp-guardian\n") found = process.pid;
    }
    return found != 0;
  });
  return found;
}

int LaunchProcess::wait(std::chrono::seconds patience) {
  if (ended_) throw std::logic_error("waited for twice");
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  REQUIRE(pidfd >= 0);
  pollfd poll{pidfd, POLLIN, 0};
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(patience);
  const int ready = ::poll(&poll, 1, static_cast<int>(milliseconds.count()));
  ::close(pidfd);
  if (ready != 1) FAIL("the launcher did not end; its messages:\n" << errors());
  int status = 0;
  REQUIRE(::waitpid(pid_, &status, 0) == pid_);
  ended_ = true;
  seconds_ = std::chrono::duration<double>(Clock::now() - started_).count();
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

bool LaunchProcess::has(const std::string& file) const {
  return std::filesystem::exists(folder_ + "/" + file);
}

std::string LaunchProcess::read(const std::string& file) const {
  return read_file(folder_ + "/" + file);
}

void LaunchProcess::write(const std::string& file, const std::string& text) const {
  std::ofstream(folder_ + "/" + file, std::ios::binary) << text;
}

void LaunchProcess::await_files(const std::vector<std::string>& files) const {
  for (const std::string& file : files) {
    await(("there is a file " + file).c_str(), [&] { return has(file); });
  }
}

pid_t LaunchProcess::pid_from(const std::string& file) const {
  await(("a pid is in the file " + file).c_str(),
        [&] { return read(file).find('\n') != std::string::npos; });
  return std::atoi(read(file).c_str());
}

std::vector<pid_t> LaunchProcess::processes() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::istringstream environment(read_file("/proc/" + name + "/environ"));
    for (std::string variable; std::getline(environment, variable, '\0');) {
      if (variable == mark_) {
        found.push_back(std::atoi(name.c_str()));
        break;
      }
    }
  }
  return found;
}

bool LaunchProcess::none_left(std::chrono::seconds patience) const {
  const auto deadline = Clock::now() + patience;
  while (!processes().empty()) {
    if (Clock::now() >= deadline) return false;
    const timespec pause{0, 5000000};
    ::nanosleep(&pause, nullptr);
  }
  return true;
}

std::vector<std::string> with_script(std::vector<std::string> options, const std::string& script) {
  options.insert(options.end(), {"--use_env", "/bin/sh", "-c", script});
  return options;
}

std::string worker_program() { return DDP_LAUNCH_TEST_WORKER; }

char process_state(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? '\0' : stat[name_end + 2];
}

}  // namespace ddp::launcher::test
