#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include <fmt/format.h>

#include <launcher/environment.h>
#include <launcher/error.h>
#include <launcher/root_cause.h>
#include <launcher/worker_group.h>

namespace ddp::launcher {
namespace {

int open_pidfd(pid_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

using KernelSet = std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)>;

/// `cpus` as sched_setaffinity wants it, and its size in bytes.
std::pair<KernelSet, size_t> kernel_set(const CpuSet& cpus) {
  const int capacity = cpus.back() + 1;
  const size_t size = CPU_ALLOC_SIZE(capacity);
  KernelSet set(CPU_ALLOC(capacity), [](cpu_set_t* s) { CPU_FREE(s); });
  CPU_ZERO_S(size, set.get());
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), size, set.get());
  return {std::move(set), size};
}

}  // namespace

WorkerGroup::WorkerGroup(const Job& job, const SignalTakeover& signals, EventLoop& loop,
                         const FileLimit& limit)
    : job_(job),
      signals_(signals),
      loop_(loop),
      limit_(limit),
      exec_errors_(static_cast<size_t>(job.options.nproc_per_node)) {}

void WorkerGroup::start(const Master& master, int attempt, Output& output, const ErrorFiles& errors,
                        const std::function<bool()>& go_on) {
  const Options& options = job_.options;
  WorkerEnvironment environment(environ, job_, master, attempt);
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));

  std::string rank_argument;
  std::vector<char*> arguments;
  // execve takes pointers to char for the sake of old programs; it does not write.
  for (const std::string& word : job_.command.words)
    arguments.push_back(const_cast<char*>(word.c_str()));
  const size_t rank_at = job_.command.rank_at;
  const bool has_rank = !job_.command.rank_option.empty();
  if (has_rank) arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(rank_at), nullptr);
  arguments.push_back(nullptr);

  const auto count = static_cast<size_t>(options.nproc_per_node);
  // Without a pidfd (an old kernel, too many open files) SIGCHLD still tells of a worker's end,
  // only the order of ends is less exact.
  size_t pidfds_left = std::min(count, limit_.available());
  workers_.reserve(count);
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    const size_t index = workers_.size();
    if (has_rank) {
      rank_argument = fmt::format("{}{}", job_.command.rank_option,
                                  options.virtual_local_rank ? 0 : local_rank);
      arguments[rank_at] = rank_argument.data();
    }
    Worker worker;
    worker.rank = job_.placement.rank(local_rank);
    worker.local_rank = local_rank;
    worker.files = output.files_of(local_rank);
    const auto streams = output.open_streams(local_rank);

    SpawnRequest request;
    request.path = job_.command.path.c_str();
    request.arguments = arguments.data();
    request.environment = environment.of(local_rank, errors.path_of(index));
    request.signals = &signals_;
    request.error = &exec_errors_[index];
    if (local_rank > 0) request.standard_fds[STDIN_FILENO] = no_input.get();
    request.standard_fds[STDOUT_FILENO] = streams[0].get();
    request.standard_fds[STDERR_FILENO] = streams[1].get();
    if (worker.rank == 0) request.keep_fd = master.reserved.get();
    request.open_files = &limit_.original();
    std::pair<KernelSet, size_t> cpus{KernelSet(nullptr, [](cpu_set_t*) {}), 0};
    if (!job_.cpus.empty()) cpus = kernel_set(job_.cpus[index]);
    request.cpus = cpus.first.get();
    request.cpus_size = cpus.second;

    worker.started = std::chrono::system_clock::now();
    worker.pid = spawn(request);
    if (worker.pid < 0) {
      throw Error(
          ExitStatus::kSetup,
          fmt::format(
              "cannot start rank {}: {} (is there a limit on processes or memory? see ulimit -a)",
              worker.rank, std::strerror(errno)));
    }
    UniqueFd pidfd;
    if (pidfds_left > 0) {
      pidfd = UniqueFd(open_pidfd(worker.pid));
      --pidfds_left;
    }
    if (pidfd) {
      loop_.watch(pidfd.get(), EPOLLIN, {EventTag::Source::kWorker, static_cast<uint32_t>(index)});
    }
    pidfds_.push_back(std::move(pidfd));
    workers_.push_back(std::move(worker));
    ++running_;
    if (!go_on()) return;
  }
}

void WorkerGroup::handle_end(size_t index) {
  Worker& worker = workers_[index];
  int status = 0;
  if (worker.running() && ::waitpid(worker.pid, &status, WNOHANG) == worker.pid)
    ended(worker, status);
}

void WorkerGroup::reaped(pid_t pid, int wait_status) {
  const auto found = std::find_if(workers_.begin(), workers_.end(), [pid](const Worker& worker) {
    return worker.running() && worker.pid == pid;
  });
  if (found != workers_.end()) ended(*found, wait_status);
}

void WorkerGroup::ended(Worker& worker, int wait_status) {
  const auto index = static_cast<size_t>(&worker - workers_.data());
  worker.ended_with(wait_status);
  --running_;
  if (pidfds_[index]) loop_.forget(pidfds_[index].get());
  pidfds_[index].reset();
  if (ends_expected_ || !worker.failed()) return;
  failures_.push_back(index);
  if (exec_error_ == 0) exec_error_ = exec_errors_[index];
}

void WorkerGroup::expect_ends() {
  if (!ends_expected_) ends_expected_ = std::chrono::system_clock::now();
  for (Worker& worker : workers_) worker.stopped |= worker.running();
}

void WorkerGroup::order_failures() {
  if (ends_expected_) launcher::order_failures(workers_, failures_, *ends_expected_);
}

void WorkerGroup::signal_groups(int signal) const {
  for (const Worker& worker : workers_) {
    if (!worker.group_alive) continue;
    // A worker that has just been started may not lead its group yet.
    if (::kill(-worker.pid, signal) != 0 && worker.running()) ::kill(worker.pid, signal);
  }
}

void WorkerGroup::signal_workers(int signal) const {
  for (const Worker& worker : workers_) {
    if (worker.running()) ::kill(worker.pid, signal);
  }
}

void WorkerGroup::forget_empty_groups() {
  for (Worker& worker : workers_) {
    if (worker.running() || !worker.group_alive) continue;
    worker.group_alive = ::kill(-worker.pid, 0) == 0 || errno != ESRCH;
  }
}

bool WorkerGroup::groups_empty() const {
  return std::none_of(workers_.begin(), workers_.end(),
                      [](const Worker& worker) { return worker.group_alive; });
}

}  // namespace ddp::launcher
