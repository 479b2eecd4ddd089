// What the supervisor of an elastic job does between the rounds, and what it says to its agent.

#include <signal.h>

#include <chrono>
#include <utility>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/master.h>
#include <launcher/program.h>
#include <launcher/report.h>
#include <launcher/root_cause.h>
#include <launcher/supervisor.h>

namespace ddp::launcher {
namespace {

/// What the agent gets to say good-bye to the others; on the host it waits for them.
constexpr std::chrono::seconds kParting{5};

}  // namespace

int Supervisor::run_elastic() {
  bool failed = false;  // in the last round
  while (meet()) {
    run_attempt();
    await_word();
    failed = !workers_->failures().empty();
    if (over()) break;
    if (failed) say_failure(verdict());
    failed = false;
  }
  const int status = failed && !front_died_ ? failed_report() : elastic_report();
  part();
  while (!output_.all_shown()) wait_for_events();
  return status;
}

bool Supervisor::over() const {
  return front_died_ || told_to_end_ || timed_out_ || agent_->end().has_value();
}

/// Waits for a round that this node is in. False where there is none any more.
bool Supervisor::meet() {
  phase_ = Phase::kMeeting;
  workers_.reset();
  uint16_t port = 0;
  UniqueFd reserved = reserve_port_for_all_nodes(&port, job_.master.port);
  agent_->join(port);
  while (!agent_->round() && !over()) wait_for_events();
  if (over()) return false;
  const AgentLink::Round& round = *agent_->round();
  attempt_ = round.number;
  restarts_ = round.restarts;
  job_.placement = round.placement;
  job_.master = Master();
  job_.master.address = round.address;
  job_.master.port = static_cast<uint16_t>(round.port);
  if (round.placement.node_rank == 0) job_.master.reserved = std::move(reserved);
  return true;
}

/// Whether the workers of this round have all ended with 0, and nobody has called the round off.
bool Supervisor::work_done() const {
  return workers_ && workers_->running() == 0 && workers_->failures().empty() && !timed_out_ &&
         !agent_->restart() && !agent_->end();
}

/// The workers have ended: says so, where they have all done their work, and waits until the agent
/// says what comes next.
void Supervisor::await_word() {
  if (phase_ == Phase::kEnded && !front_died_) phase_ = Phase::kMeeting;
  job_.master.reserved.reset();
  const bool stopped = agent_->restart() || !workers_->failures().empty();
  if (!over() && !stopped) agent_->report_done();
  while (!agent_->restart() && !over()) wait_for_events();
}

void Supervisor::tell_failure() {
  const Worker& first = workers_->workers()[workers_->failures().front()];
  WorkerFailure failure;
  failure.rank = first.rank;
  failure.local_rank = first.local_rank;
  failure.pid = first.pid;
  failure.status = first.status();
  failure.how = describe_end(first);
  if (workers_->exec_error() != 0) {
    const ExecFailure why = explain_exec_failure(job_.command.path, workers_->exec_error());
    failure.status = why.status;
    failure.how = fmt::format("could not be started: {}", why.text);
  }
  agent_->report_failure(failure, /*final=*/workers_->exec_error() != 0);
}

/// Stops running workers whose round is over. Returns whether it did.
bool Supervisor::act_on_word() {
  if (!agent_->restart() && !agent_->end()) return false;
  output_.say(fmt::format("{}\nstopping {} worker{}", verdict(), workers_->running(),
                          workers_->running() == 1 ? "" : "s"));
  stop(SIGTERM);
  return true;
}

/// Why the round is over, and what comes now.
std::string Supervisor::verdict() const {
  if (agent_->end() && agent_->end()->lost) return agent_->end()->text;
  if (agent_->end()) return fmt::format("the job has ended: {}", agent_->end()->text);
  return fmt::format("starting all workers of all nodes again: {}", *agent_->restart());
}

void Supervisor::say_failure(const std::string& ending) {
  output_.say(failure_report(workers_->workers(), workers_->failures(), host(),
                             job_.options.command.front(), ending));
}

/// A worker of this node has failed, and there is no other round. The status is that of the job's
/// first failure, the same on all nodes.
int Supervisor::failed_report() {
  if (workers_->exec_error() != 0 || told_to_end_ || timed_out_ || !agent_->end()) return report();
  const bool lost = agent_->end()->lost;
  const int status =
      lost ? failure_status(workers_->workers(), workers_->failures()) : agent_->end()->status;
  say_failure(fmt::format("{}\nexit status: {}", verdict(), status));
  tell_root_cause();
  return status;
}

int Supervisor::elastic_report() {
  if (front_died_) return ExitStatus::kSignalBase + SIGKILL;
  if (told_to_end_ || timed_out_) return stopped_report();
  const AgentLink::End& end = *agent_->end();
  if (end.status != 0) output_.say(fmt::format("{}\nexit status: {}", verdict(), end.status));
  return end.status;
}

/// Gives the agent time to tell the others, or on the host to let them read the end.
void Supervisor::part() {
  phase_ = Phase::kMeeting;
  parting_ = true;
  deadline_ = Clock::now() + kParting;
  if (agent_->host()) deadline_ += job_.options.elastic->close_timeout;
  while (!agent_->gone() && !front_died_ && !hurried_ && Clock::now() < deadline_)
    wait_for_events();
}

}  // namespace ddp::launcher
