#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <launcher/descendants.h>
#include <launcher/error.h>
#include <launcher/outer_launcher.h>
#include <launcher/program.h>
#include <launcher/report.h>
#include <launcher/root_cause.h>
#include <launcher/standard_fds.h>
#include <launcher/supervisor.h>

namespace ddp::launcher {
namespace {

using std::chrono::milliseconds;

/// What a worker's own helpers get to end by themselves once it has.
constexpr milliseconds kLeftoverExit{100};
constexpr milliseconds kLeftoverGrace{1000};
/// A process stuck in the kernel (a dead network file system, a device) cannot be killed: after
/// this it is named and left.
constexpr milliseconds kKillLimit{10000};

std::string seconds(milliseconds time) {
  return fmt::format("{:g} s", std::chrono::duration<double>(time).count());
}

const char* plural(size_t count) { return count == 1 ? "" : "s"; }

}  // namespace

Supervisor::Supervisor(Job& job, const SignalTakeover& signals, int control_fd, UniqueFd agent)
    : job_(job), signals_(signals), control_fd_(control_fd), output_(job, loop_) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  child_signal_ = UniqueFd(::signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!child_signal_) {
    throw Error(ExitStatus::kSetup,
                fmt::format("cannot watch the workers: {}", std::strerror(errno)));
  }
  loop_.watch(control_fd_, EPOLLIN, {EventTag::Source::kControl, 0});
  loop_.watch(child_signal_.get(), EPOLLIN, {EventTag::Source::kChild, 0});
  if (agent) agent_.emplace(std::move(agent), loop_);

  const size_t needed = output_.files_needed();
  if (needed > limit_.available()) {
    throw Error(ExitStatus::kSetup,
                fmt::format("showing the lines of {} workers needs {} open files more, and the "
                            "limit is {}\nRaise it (ulimit -n {}), use --redirects instead of "
                            "--tee, or show fewer workers with --local_ranks_filter.",
                            job.options.nproc_per_node, needed, limit_.limit(),
                            limit_.limit() + needed - limit_.available()));
  }
}

int Supervisor::run() {
  if (job_.options.timeout) job_deadline_ = Clock::now() + *job_.options.timeout;
  if (agent_) return run_elastic();
  while (run_attempt()) {
    const Worker& first = workers_->workers()[workers_->failures().front()];
    output_.say(failure_report(
        workers_->workers(), workers_->failures(), host(), job_.options.command.front(),
        fmt::format("starting all workers again, after rank {} {} (restart {} of {})", first.rank,
                    describe_end(first), attempt_ + 1, job_.options.max_restarts)));
    ++attempt_;
    ++restarts_;
    job_.master = renew_master(std::move(job_.master));
  }
  const int status = report();
  while (!output_.all_shown()) wait_for_events();
  return status;
}

bool Supervisor::run_attempt() {
  try {
    start_workers();
  } catch (...) {
    kill_all();
    throw;
  }
  act();  // the agent may have said already that this attempt is over
  while (phase_ != Phase::kEnded) wait_for_events();
  deadline_ = Clock::now() + job_.options.grace_period;
  output_.expect_ends();
  while (!output_.all_read()) wait_for_events();
  collect_errors();
  return may_restart();
}

void Supervisor::start_workers() {
  phase_ = Phase::kRunning;
  childless_ = false;
  output_.begin_attempt(attempt_);
  workers_.emplace(job_, signals_, loop_, limit_);
  error_files_ = make_error_files();
  // Starting thousands takes time, in which the user may think better of it.
  workers_->start(job_.master, restarts_, output_, error_files_, [this] {
    pollfd control{control_fd_, POLLIN, 0};
    while (!front_died_ && ::poll(&control, 1, 0) > 0) handle_control();
    return phase_ == Phase::kRunning && !front_died_;
  });
  release_standard_input();
}

ErrorFiles Supervisor::make_error_files() const {
  const auto count = static_cast<size_t>(job_.options.nproc_per_node);
  if (!job_.options.log_dir.empty()) {
    std::vector<std::string> folders;
    for (int local_rank = 0; local_rank < job_.options.nproc_per_node; ++local_rank)
      folders.push_back(output_.folder_of(local_rank));
    return ErrorFiles(folders);
  }
  // Each is an open file, and they are worth less than what the workers write.
  if (count + output_.files_needed() > limit_.available()) return {};
  return ErrorFiles(count);
}

bool Supervisor::in_haste() const { return told_to_end_ || timed_out_; }

int Supervisor::wait_timeout() const {
  std::optional<Clock::time_point> until;
  if (phase_ == Phase::kRunning || (phase_ == Phase::kMeeting && !parting_) ||
      (phase_ == Phase::kEnded && !in_haste())) {
    until = job_deadline_;
  } else {
    until = deadline_;
  }
  if (!until) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*until - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, INT_MAX));
}

void Supervisor::wait_for_events() {
  // The loop gives the workers in the order in which they ended, so the first failure is known even
  // when several are dead by the time that this process runs. Then the rest of the dead are reaped
  // before anything is done about them: who died of his own accord must not be taken for one that
  // the launcher stopped.
  bool ended = false;
  loop_.wait(wait_timeout(), [&](EventTag tag) {
    switch (tag.source) {
      case EventTag::Source::kControl:
        handle_control();
        break;
      case EventTag::Source::kChild:
        child_signaled_ = true;
        break;
      case EventTag::Source::kWorker:
        workers_->handle_end(tag.index);
        ended = true;
        break;
      case EventTag::Source::kPipe:
        output_.handle_pipe(tag.index);
        break;
      case EventTag::Source::kScreen:
        output_.handle_screen(tag.index);
        break;
      case EventTag::Source::kAgent:
        for (const std::string& text : agent_->handle()) output_.say(text);
        break;
    }
  });
  if (ended || child_signaled_) reap();
  act();
}

void Supervisor::reap() {
  child_signaled_ = false;
  signalfd_siginfo ignored{};
  while (::read(child_signal_.get(), &ignored, sizeof(ignored)) > 0) {
  }
  childless_ = !reap_children([this](pid_t pid, int status) {
    if (workers_) workers_->reaped(pid, status);
  });
  // A group that has lost its leader loses its last member as a child of this process, too.
  if (workers_) workers_->forget_empty_groups();
}

void Supervisor::handle_control() {
  std::array<unsigned char, 64> signals;
  const ssize_t count = ::read(control_fd_, signals.data(), signals.size());
  if (count == 0) {
    front_died_ = true;
    loop_.forget(control_fd_);  // it tells of nothing else from now on
  }
  for (ssize_t i = 0; i < count; ++i) handle_signal(signals[static_cast<size_t>(i)]);
}

void Supervisor::handle_signal(int signal) {
  const bool ending = job_.options.ending_signals.count(signal) != 0;
  if (!ending && !workers_) return;
  if (signal == SIGTSTP) {
    // Not SIGTSTP itself: the kernel ignores it in groups that no shell looks after.
    if (phase_ == Phase::kRunning) workers_->signal_groups(SIGSTOP);
  } else if (signal == SIGCONT) {
    workers_->signal_groups(SIGCONT);
  } else if (ending) {
    end_by_signal(signal);
  } else {
    workers_->signal_workers(signal);
  }
}

void Supervisor::end_by_signal(int signal) {
  if (parting_) {
    hurried_ = true;
    return;
  }
  if (agent_ && !told_to_end_) {
    stop_signal_ = signal;
    // A node whose workers have done their work may leave without disturbing the others; it may be
    // told to before it has said so.
    if (phase_ != Phase::kMeeting && work_done()) agent_->report_done();
    agent_->leave(fmt::format("has left the job ({})", signal_name(signal)));
  }
  told_to_end_ = true;
  switch (phase_) {
    case Phase::kMeeting:
      output_.say(fmt::format("received {}: leaving the job", signal_name(signal)));
      break;
    case Phase::kRunning:
      if (workers_->running() == 0) return;
      stop_signal_ = signal;
      output_.say(
          fmt::format("received {}: passing it to {} worker{}; what is left after {} is killed",
                      signal_name(signal), workers_->running(), plural(workers_->running()),
                      seconds(job_.options.grace_period)));
      stop(signal);
      break;
    case Phase::kStopping:
    case Phase::kLeftovers:
    case Phase::kLeftoversTold:
      if (signal == SIGINT) {
        output_.say("interrupted again: killing the workers");
        kill_all();
      } else {
        workers_->signal_groups(signal);
      }
      break;
    case Phase::kEnded:
      output_.abandon_screens();
      break;
  }
}

void Supervisor::act() {
  while (act_once()) {
  }
}

/// Returns whether it did something that may call for more.
bool Supervisor::act_once() {
  const bool late = Clock::now() >= deadline_;
  const bool job_late = job_deadline_ && Clock::now() >= *job_deadline_;
  if (front_died_ && phase_ != Phase::kEnded) {
    kill_all();
    return true;
  }
  switch (phase_) {
    case Phase::kMeeting:
      if (job_late && !timed_out_ && !parting_) {
        timed_out_ = true;
        agent_->close(ExitStatus::kTimeout, timeout_text());
      }
      return false;
    case Phase::kRunning:
      if (!workers_->failures().empty()) {
        if (agent_) tell_failure();
        const Worker& first = workers_->workers()[workers_->failures().front()];
        if (workers_->running() > 0 && workers_->exec_error() == 0) {
          output_.say(fmt::format(
              "rank {} (pid {}) {}: stopping the other{}; what is left after {} is killed",
              first.rank, first.pid, describe_end(first), plural(workers_->running()),
              seconds(job_.options.grace_period)));
        }
        stop(SIGTERM);
        return true;
      }
      if (workers_->running() == 0) {
        end_leftovers();
        return true;
      }
      if (agent_ && act_on_word()) return true;
      if (job_late) {
        timed_out_ = true;
        if (agent_) agent_->close(ExitStatus::kTimeout, timeout_text());
        output_.say(
            fmt::format("the job took longer than {} (--timeout): stopping {} worker{}; what is "
                        "left after {} is killed",
                        seconds(*job_.options.timeout), workers_->running(),
                        plural(workers_->running()), seconds(job_.options.grace_period)));
        stop(SIGTERM);
        return true;
      }
      return false;
    case Phase::kStopping:
      if (workers_->groups_empty()) {
        end_leftovers();
        return true;
      }
      if (late) {
        if (workers_->running() > 0) {
          output_.say(fmt::format("{} worker{} did not end within {}: killed", workers_->running(),
                                  plural(workers_->running()), seconds(job_.options.grace_period)));
        }
        kill_all();
      }
      return false;
    case Phase::kLeftovers:
    case Phase::kLeftoversTold:
      if (childless_) {
        phase_ = Phase::kEnded;
      } else if (late && phase_ == Phase::kLeftovers) {
        tell_leftovers();
      } else if (late) {
        kill_all();
      }
      return false;
    case Phase::kEnded:
      if (front_died_ || job_late || (late && in_haste())) output_.abandon_screens();
      return false;
  }
  return false;
}

void Supervisor::stop(int signal) {
  phase_ = Phase::kStopping;
  deadline_ = Clock::now() + job_.options.grace_period;
  workers_->expect_ends();
  workers_->signal_groups(signal);
  workers_->signal_groups(SIGCONT);  // a stopped process gets the other signal only once it runs
  workers_->forget_empty_groups();
}

void Supervisor::end_leftovers() {
  phase_ = Phase::kLeftovers;
  deadline_ = Clock::now() + kLeftoverExit;
  reap();
}

void Supervisor::tell_leftovers() {
  phase_ = Phase::kLeftoversTold;
  deadline_ = Clock::now() + std::min(kLeftoverGrace, job_.options.grace_period);
  std::vector<pid_t> left;
  for (const Process& process : descendants_of(::getpid())) {
    if (process.zombie) continue;
    left.push_back(process.pid);
    ::kill(process.pid, SIGTERM);
    ::kill(process.pid, SIGCONT);
  }
  if (left.empty()) return;
  output_.say(fmt::format("ending {} process{} that the workers left behind (pid {})", left.size(),
                          left.size() == 1 ? "" : "es", fmt::join(left, ", ")));
}

void Supervisor::kill_all() {
  phase_ = Phase::kEnded;
  if (workers_) {
    workers_->expect_ends();
    workers_->signal_groups(SIGKILL);
  }
  const auto immortal = kill_descendants(kKillLimit, [this](pid_t pid, int status) {
    if (workers_) workers_->reaped(pid, status);
  });
  if (!immortal.empty() && !front_died_) {
    output_.say(fmt::format("cannot kill the process{} {}: left behind",
                            immortal.size() == 1 ? "" : "es", fmt::join(immortal, ", ")));
  }
}

bool Supervisor::may_restart() const {
  return !workers_->failures().empty() && workers_->exec_error() == 0 && !front_died_ &&
         !told_to_end_ && (!job_deadline_ || Clock::now() < *job_deadline_) &&
         attempt_ < job_.options.max_restarts;
}

void Supervisor::collect_errors() {
  if (workers_->failures().empty()) return;
  std::vector<Worker>& workers = workers_->workers();
  for (size_t index = 0; index < workers.size(); ++index) {
    if (!workers[index].failed()) continue;
    const std::string content = error_files_.content_of(index);
    workers[index].error_text = error_text(content);
    workers[index].error_time = error_time(content);
  }
  workers_->order_failures();
}

std::string Supervisor::host() const {
  if (!job_.options.local_addr.empty()) return job_.options.local_addr;
  char name[256] = "";
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "?";
}

int Supervisor::report() {
  if (front_died_) return ExitStatus::kSignalBase + SIGKILL;
  if (workers_->exec_error() != 0) {
    const ExecFailure failure = explain_exec_failure(job_.command.path, workers_->exec_error());
    output_.say(failure.text);
    return failure.status;
  }
  const std::vector<Worker>& workers = workers_->workers();
  if (!workers_->failures().empty()) {
    output_.say(
        failure_report(workers, workers_->failures(), host(), job_.options.command.front()));
    tell_root_cause();
    return failure_status(workers, workers_->failures());
  }
  return stopped_report();
}

void Supervisor::tell_root_cause() const {
  const size_t root_cause = workers_->failures().front();
  tell_outer_launcher(
      error_content(workers_->workers()[root_cause], error_files_.content_of(root_cause), host()));
}

std::string Supervisor::timeout_text() const {
  return fmt::format("stopped after {} (--timeout)", seconds(*job_.options.timeout));
}

/// Of workers of whom none has failed. 0 where they were not stopped either.
int Supervisor::stopped_report() {
  const std::vector<Worker> none;
  const std::vector<Worker>& workers = workers_ ? workers_->workers() : none;
  if (timed_out_) {
    output_.say(stop_report(workers, timeout_text(), ExitStatus::kTimeout));
    return ExitStatus::kTimeout;
  }
  if (stop_signal_ != 0) {
    const int status = ExitStatus::kSignalBase + stop_signal_;
    output_.say(
        stop_report(workers, fmt::format("stopped by {}", signal_name(stop_signal_)), status));
    return status;
  }
  return 0;
}

}  // namespace ddp::launcher
