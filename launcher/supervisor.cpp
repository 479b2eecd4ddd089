#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include <launcher/descendants.h>
#include <launcher/environment.h>
#include <launcher/error.h>
#include <launcher/message.h>
#include <launcher/program.h>
#include <launcher/report.h>
#include <launcher/spawn.h>
#include <launcher/standard_fds.h>
#include <launcher/supervisor.h>

namespace ddp::launcher {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint64_t kControlTag = UINT64_MAX;
constexpr uint64_t kChildTag = UINT64_MAX - 1;

/// What a worker's own helpers get to end by themselves once it has.
constexpr milliseconds kLeftoverExit{100};
constexpr milliseconds kLeftoverGrace{1000};
/// A process stuck in the kernel (a dead network file system, a device) cannot be killed: after
/// this it is named and left.
constexpr milliseconds kKillLimit{10000};

int open_pidfd(pid_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

std::string seconds(milliseconds time) {
  return fmt::format("{:g} s", std::chrono::duration<double>(time).count());
}

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "?";
}

const char* plural(size_t count) { return count == 1 ? "" : "s"; }

}  // namespace

Supervisor::Supervisor(const Job& job, const SignalTakeover& signals, int control_fd)
    : job_(job),
      signals_(signals),
      control_fd_(control_fd),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      exec_errors_(static_cast<size_t>(job.options.nproc_per_node)) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  child_signal_ = UniqueFd(::signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!epoll_ || !child_signal_) {
    throw Error(ExitStatus::kSetup,
                fmt::format("cannot watch the workers: {}", std::strerror(errno)));
  }
  watch(control_fd_, kControlTag);
  watch(child_signal_.get(), kChildTag);
}

void Supervisor::watch(int fd, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
}

int Supervisor::run() {
  if (!start_workers()) {
    kill_all();
    return ExitStatus::kSetup;
  }
  while (!finished()) wait_for_events();
  return finish();
}

bool Supervisor::start_workers() {
  const Options& options = job_.options;
  WorkerEnvironment environment(environ, options, job_.master);
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));

  std::string local_rank_argument;
  std::vector<char*> arguments;
  // execve takes pointers to char for the sake of old programs; it does not write.
  for (const std::string& word : options.command)
    arguments.push_back(const_cast<char*>(word.c_str()));
  if (!options.use_env) arguments.insert(arguments.begin() + 1, nullptr);
  arguments.push_back(nullptr);

  workers_.reserve(static_cast<size_t>(options.nproc_per_node));
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    if (!options.use_env) {
      local_rank_argument = fmt::format("--local_rank={}", local_rank);
      arguments[1] = local_rank_argument.data();
    }
    Worker worker;
    worker.rank = options.rank(local_rank);
    worker.local_rank = local_rank;
    worker.started = std::chrono::system_clock::now();
    SpawnRequest request{job_.program.c_str(), arguments.data(), environment.of(local_rank),
                         &signals_, &exec_errors_[workers_.size()]};
    if (local_rank > 0) request.stdin_fd = no_input.get();
    if (worker.rank == 0) request.keep_fd = job_.master.reserved.get();
    worker.pid = spawn(request);
    if (worker.pid < 0) {
      print_message(fmt::format(
          "cannot start rank {}: {} (is there a limit on processes or memory? see ulimit -a)",
          worker.rank, std::strerror(errno)));
      return false;
    }
    // Without a pidfd (an old kernel, too many open files) SIGCHLD still tells of its end, only the
    // order of ends is less exact.
    UniqueFd pidfd(open_pidfd(worker.pid));
    if (pidfd) watch(pidfd.get(), workers_.size());
    pidfds_.push_back(std::move(pidfd));
    workers_.push_back(worker);
    ++running_;
  }
  release_standard_input();
  return true;
}

bool Supervisor::finished() const {
  switch (phase_) {
    case Phase::kRunning:
      return running_ == 0;
    case Phase::kStopping:
      return std::none_of(workers_.begin(), workers_.end(),
                          [](const Worker& worker) { return worker.group_alive; });
    case Phase::kKilled:
      break;
  }
  return true;
}

int Supervisor::wait_timeout() const {
  if (phase_ != Phase::kStopping) return -1;
  const auto left = std::chrono::ceil<milliseconds>(deadline_ - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, INT_MAX));
}

void Supervisor::wait_for_events() {
  // epoll gives the pidfds in the order in which they became readable, so the first failure is
  // known even when several workers are dead by the time that this process runs. Then the rest of
  // the dead are reaped before anything is done about them: who died of his own accord must not be
  // taken for one that the launcher stopped.
  const bool ended = handle_events(wait_timeout());
  if (ended || child_signaled_) {
    child_signaled_ = false;
    signalfd_siginfo ignored{};
    while (::read(child_signal_.get(), &ignored, sizeof(ignored)) > 0) {
    }
    reap_children([this](pid_t pid, int status) { child_reaped(pid, status); });
    // A group that has lost its leader loses its last member as a child of this process, too.
    forget_empty_groups();
  }
  act();
}

bool Supervisor::handle_events(int timeout) {
  std::array<epoll_event, 64> events;
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
  bool ended = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
    if (tag == kControlTag) {
      handle_control();
    } else if (tag == kChildTag) {
      child_signaled_ = true;
    } else {
      Worker& worker = workers_[tag];
      int status = 0;
      if (worker.running() && ::waitpid(worker.pid, &status, WNOHANG) == worker.pid) {
        worker_ended(worker, status);
        ended = true;
      }
    }
  }
  return ended;
}

void Supervisor::child_reaped(pid_t pid, int wait_status) {
  const auto found = std::find_if(workers_.begin(), workers_.end(), [pid](const Worker& worker) {
    return worker.running() && worker.pid == pid;
  });
  if (found != workers_.end()) worker_ended(*found, wait_status);
}

void Supervisor::worker_ended(Worker& worker, int wait_status) {
  const auto index = static_cast<size_t>(&worker - workers_.data());
  worker.ended_with(wait_status);
  --running_;
  if (pidfds_[index]) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pidfds_[index].get(), nullptr);
  pidfds_[index].reset();
  if (phase_ != Phase::kRunning || !worker.failed()) return;
  failures_.push_back(index);
  if (exec_error_ == 0) exec_error_ = exec_errors_[index];
}

void Supervisor::handle_control() {
  std::array<unsigned char, 64> signals;
  const ssize_t count = ::read(control_fd_, signals.data(), signals.size());
  if (count == 0) front_died_ = true;
  for (ssize_t i = 0; i < count; ++i) handle_signal(signals[static_cast<size_t>(i)]);
}

void Supervisor::handle_signal(int signal) {
  if (signal == SIGTSTP) {
    // Not SIGTSTP itself: the kernel ignores it in groups that no shell looks after.
    if (phase_ == Phase::kRunning) signal_groups(SIGSTOP);
  } else if (signal == SIGCONT) {
    signal_groups(SIGCONT);
  } else if (phase_ == Phase::kRunning) {
    if (running_ == 0) return;
    stop_signal_ = signal;
    print_message(fmt::format(
        "received {}: passing it to {} worker{}; what is left after {} is killed",
        signal_name(signal), running_, plural(running_), seconds(job_.options.grace_period)));
    stop(signal);
  } else if (phase_ == Phase::kStopping) {
    if (signal == SIGINT) {
      print_message("interrupted again: killing the workers");
      kill_all();
    } else {
      signal_groups(signal);
    }
  }
}

void Supervisor::act() {
  if (front_died_) {
    kill_all();
  } else if (phase_ == Phase::kRunning && !failures_.empty()) {
    const Worker& first = workers_[failures_.front()];
    if (running_ > 0 && exec_error_ == 0) {
      print_message(fmt::format(
          "rank {} (pid {}) {}: stopping the other{}; what is left after {} is killed", first.rank,
          first.pid, describe_end(first), plural(running_), seconds(job_.options.grace_period)));
    }
    stop(SIGTERM);
  } else if (phase_ == Phase::kStopping && Clock::now() >= deadline_ && !finished()) {
    if (running_ > 0) {
      print_message(fmt::format("{} worker{} did not end within {}: killed", running_,
                                plural(running_), seconds(job_.options.grace_period)));
    }
    kill_all();
  }
}

void Supervisor::stop(int signal) {
  phase_ = Phase::kStopping;
  deadline_ = Clock::now() + job_.options.grace_period;
  for (Worker& worker : workers_) worker.stopped = worker.running();
  signal_groups(signal);
  signal_groups(SIGCONT);  // a stopped process gets the other signal only once it runs
}

void Supervisor::kill_all() {
  phase_ = Phase::kKilled;
  for (Worker& worker : workers_) worker.stopped |= worker.running();
  signal_groups(SIGKILL);
  const auto immortal =
      kill_descendants(kKillLimit, [this](pid_t pid, int status) { child_reaped(pid, status); });
  if (!immortal.empty() && !front_died_) {
    print_message(fmt::format("cannot kill the process{} {}: left behind",
                              immortal.size() == 1 ? "" : "es", fmt::join(immortal, ", ")));
  }
}

void Supervisor::end_leftovers() {
  const auto ignore = [](pid_t, int) {};
  if (!reap_children(ignore) || await_descendants(kLeftoverExit, ignore)) return;
  std::vector<pid_t> left;
  for (const Process& process : descendants_of(::getpid())) {
    if (process.zombie) continue;
    left.push_back(process.pid);
    ::kill(process.pid, SIGTERM);
    ::kill(process.pid, SIGCONT);
  }
  if (!left.empty()) {
    print_message(fmt::format("ending {} process{} that the workers left behind (pid {})",
                              left.size(), left.size() == 1 ? "" : "es", fmt::join(left, ", ")));
  }
  if (!await_descendants(std::min(kLeftoverGrace, job_.options.grace_period), ignore)) kill_all();
}

void Supervisor::signal_groups(int signal) const {
  for (const Worker& worker : workers_) {
    if (!worker.group_alive) continue;
    // A worker that has just been started may not lead its group yet.
    if (::kill(-worker.pid, signal) != 0 && worker.running()) ::kill(worker.pid, signal);
  }
}

void Supervisor::forget_empty_groups() {
  for (Worker& worker : workers_) {
    if (worker.running() || !worker.group_alive) continue;
    worker.group_alive = ::kill(-worker.pid, 0) == 0 || errno != ESRCH;
  }
}

int Supervisor::finish() {
  if (phase_ != Phase::kKilled) end_leftovers();
  if (front_died_) return ExitStatus::kSignalBase + SIGKILL;
  if (exec_error_ != 0) {
    const ExecFailure failure = explain_exec_failure(job_.program, exec_error_);
    print_message(failure.text);
    return failure.status;
  }
  if (!failures_.empty()) {
    print_message(failure_report(workers_, failures_, host_name(), job_.options.command.front()));
    return workers_[failures_.front()].status();
  }
  if (stop_signal_ != 0) {
    print_message(stop_report(workers_, stop_signal_));
    return ExitStatus::kSignalBase + stop_signal_;
  }
  return 0;
}

}  // namespace ddp::launcher
