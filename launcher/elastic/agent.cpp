#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include <launcher/elastic/agent.h>
#include <launcher/elastic/agent_channel.h>
#include <launcher/elastic/call_limit.h>
#include <launcher/elastic/coordinator.h>
#include <launcher/elastic/fields.h>
#include <launcher/elastic/member.h>
#include <launcher/elastic/shared_state.h>
#include <launcher/elastic/store_connection.h>
#include <launcher/environment.h>
#include <launcher/error.h>

// Note [Agent]
// A launcher of an elastic job has a third process, `ddp-rendezvous`, the agent: it talks to the
// store, and on the host it serves it. It is a child of the front and no descendant of the guardian
// (see Note [Front and guardian]), which it knows by a socket alone.
//   - A call of the store may wait as long as it likes: signals and workers are the guardian's,
//   which
//     never waits for the agent without a limit of its own.
//   - What the store's client cannot do, to give up on a peer that is silent, a timer does
//     (CallLimit): it ends the process, and the guardian takes that for a lost store.
//   - LibTorch, its threads and its memory are in neither of the processes that fork.
//   - When the guardian dies, the agent reads end-of-file, tells the others that its node has left,
//     and ends. When the agent dies, the guardian stops its workers, and the others notice the
//     silence.
// It shares with the others Note [Elastic state], under the keys below.

namespace ddp::launcher {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kIdentityKey = "ddp/elastic/job";
constexpr const char* kStateKey = "ddp/elastic/state";
constexpr const char* kIdentity = "ddp elastic job";

constexpr milliseconds kPoll{100};
/// Each further so many nodes make all poll slower by one kPoll.
constexpr size_t kNodesAtPace = 100;
/// The launcher has gone, and somebody may wait for the last of its processes.
constexpr milliseconds kParting{2000};
constexpr milliseconds kSayAfter{5000};

std::string beat_key(const std::string& id) { return "ddp/elastic/beat/" + id; }

[[noreturn]] void give_up(const std::string& text) { throw Error(ExitStatus::kSetup, text); }

class Agent {
 public:
  Agent(const Job& job, const std::string& plugin, int link)
      : job_(job),
        options_(*job.options.elastic),
        plugin_(plugin),
        channel_(link),
        connection_(options_, plugin_, channel_) {}

  void run();

 private:
  void describe_self();
  void become_host();
  void check_identity();
  void check_settings(const JobState& state) const;

  void take_messages();
  void handle(const ToAgent& message);
  void tick();
  void exchange_beats();
  void tell(const Member::Event& event, const JobState& state);
  void say_who_is_missing(const JobState& state);
  void leave();
  void finish();

  template <typename Call>
  auto limited(const Call& call) const {
    const CallLimit limit(channel_.gone() ? kParting : options_.read_timeout);
    return call();
  }

  const Job& job_;
  const ElasticOptions& options_;
  StorePlugin plugin_;
  AgentChannel channel_;
  StoreConnection connection_;

  std::optional<SharedState> state_;
  std::optional<Coordinator> coordinator_;  ///< on the host
  std::optional<Member> member_;
  Node self_;
  int node_rank_ = 0;
  size_t nodes_ = 1;  ///< when last seen
  Clock::time_point next_beat_;
  std::optional<Clock::time_point> waiting_since_;
};

void Agent::run() {
  if (!connection_.open()) return;
  channel_.set_taking_part();
  describe_self();
  if (self_.host) {
    become_host();
  } else {
    check_identity();
  }
  while (true) {
    const bool stay = channel_.listen(kPoll * static_cast<int>(1 + nodes_ / kNodesAtPace));
    take_messages();
    if (!stay) {
      leave();
      return;
    }
    tick();
    if (member_->closed()) {
      finish();
      return;
    }
  }
}

void Agent::describe_self() {
  self_.host = connection_.host();
  if (self_.host) {
    FromAgent host;
    host.kind = FromAgent::Kind::kHost;
    channel_.say(host);
  }
  self_.address =
      !job_.options.local_addr.empty() ? job_.options.local_addr : connection_.own_address();
  self_.pid = ::getppid();
  self_.workers = job_.options.nproc_per_node;
  self_.id = fmt::format("{}/{}/{}", self_.address, self_.pid, make_run_id());
  member_.emplace(self_.id);
}

void Agent::become_host() {
  state_.emplace(connection_.store(), kStateKey);
  Coordinator::Times times;
  times.join = options_.join_timeout;
  times.last_call = options_.last_call_timeout;
  times.keep_alive = options_.keep_alive_interval * options_.keep_alive_max_attempt;
  coordinator_.emplace(self_.id, times);
  JobState state;
  state.least = options_.least;
  state.most = options_.most;
  state.max_restarts = job_.options.max_restarts;
  limited([&] {
    state_->create(state);
    connection_.store().set(kIdentityKey, FieldWriter().text(kIdentity).text(job_.run_id).str());
  });
}

void Agent::check_identity() {
  const std::string text = limited([&] {
    if (!connection_.store().wait(kIdentityKey, options_.read_timeout / 2)) return std::string();
    return connection_.store().get(kIdentityKey).value_or("");
  });
  std::string what;
  std::string run_id;
  try {
    FieldReader in(text);
    what = in.text();
    run_id = in.text();
  } catch (const std::invalid_argument&) {
  }
  if (what != kIdentity) {
    give_up(fmt::format(
        "the store at {} is none of this launcher's (torchrun's own agents cannot take part)\nGive "
        "another port in --rdzv_endpoint, on all nodes.",
        options_.endpoint()));
  }
  if (run_id != job_.run_id) {
    give_up(
        fmt::format("the rendezvous at {} is that of another job: its --rdzv_id is '{}', and "
                    "this one's '{}'",
                    options_.endpoint(), run_id, job_.run_id));
  }
  state_.emplace(connection_.store(), kStateKey);
  check_settings(limited([&] { return state_->update([](JobState&) {}); }));
}

void Agent::check_settings(const JobState& state) const {
  if (state.least == options_.least && state.most == options_.most &&
      state.max_restarts == job_.options.max_restarts) {
    return;
  }
  give_up(
      fmt::format("the host of this job has --nnodes={}:{} --max_restarts={}, and this node "
                  "--nnodes={}:{} --max_restarts={}: give the same on all nodes",
                  state.least, state.most, state.max_restarts, options_.least, options_.most,
                  job_.options.max_restarts));
}

void Agent::take_messages() {
  while (const auto message = channel_.next()) handle(*message);
}

void Agent::handle(const ToAgent& message) {
  switch (message.kind) {
    case ToAgent::Kind::kJoin:
      self_.port = message.port;
      member_->want(self_);
      waiting_since_ = Clock::now();
      break;
    case ToAgent::Kind::kDone:
      member_->set_done(message.round);
      break;
    case ToAgent::Kind::kFailed: {
      WorkerFailure failure = message.failure;
      failure.address = self_.address;
      failure.node_rank = node_rank_;
      member_->set_failed(message.round, failure, message.final);
      break;
    }
    case ToAgent::Kind::kClose:
      member_->set_closing(message.status, message.text);
      break;
    case ToAgent::Kind::kLeave:
      break;
  }
}

void Agent::tick() {
  const auto now = Clock::now();
  exchange_beats();
  const JobState state = limited([&] {
    return state_->update([&](JobState& job) {
      member_->contribute(job);
      if (coordinator_) coordinator_->step(job, now);
    });
  });
  nodes_ = state.nodes.size();
  tell(member_->look(state), state);
  say_who_is_missing(state);
}

/// Gives a sign of life; the host takes the others'.
void Agent::exchange_beats() {
  const auto now = Clock::now();
  if (now < next_beat_) return;
  next_beat_ = now + options_.keep_alive_interval;
  limited([&] {
    if (!coordinator_) {
      connection_.store().add(beat_key(self_.id), 1);
      return;
    }
    for (const Node& node : state_->update([](JobState&) {}).nodes)
      coordinator_->heard(node.id, connection_.store().add(beat_key(node.id), 0), now);
  });
}

void Agent::tell(const Member::Event& event, const JobState& state) {
  FromAgent message;
  message.text = event.reason;
  switch (event.kind) {
    case Member::Event::Kind::kNothing:
      return;
    case Member::Event::Kind::kBegin:
      message.kind = FromAgent::Kind::kBegin;
      message.placement = state.placement_of(self_.id);
      message.round = state.round;
      message.restarts = state.restarts;
      message.address = state.nodes.front().address;
      message.port = state.nodes.front().port;
      node_rank_ = message.placement.node_rank;
      waiting_since_.reset();
      break;
    case Member::Event::Kind::kRestart:
      message.kind = FromAgent::Kind::kRestart;
      break;
    case Member::Event::Kind::kClosed:
      message.kind = FromAgent::Kind::kClosed;
      message.status = state.status;
      for (size_t i = 1; i < state.failures.size(); ++i)
        message.text += fmt::format("\nfailed as well: {}", describe(state.failures[i]));
      break;
    case Member::Event::Kind::kWaiting:
      message.text = fmt::format(
          "the job runs on {} nodes and takes no more now: waiting for a place, or its end",
          state.members());
      waiting_since_.reset();
      break;
  }
  channel_.say(message);
}

void Agent::say_who_is_missing(const JobState& state) {
  if (!waiting_since_ || Clock::now() < *waiting_since_ + kSayAfter) return;
  waiting_since_.reset();
  if (state.phase != JobState::Phase::kForming) return;
  const std::string wanted = state.least == state.most
                                 ? std::to_string(state.most)
                                 : fmt::format("{} to {}", state.least, state.most);
  channel_.say(fmt::format("waiting for more nodes: {} of {} have joined", state.joined(), wanted));
}

/// Without the host there is no store and so no job; without another node there may be.
void Agent::leave() {
  member_->want_no_more();
  if (!self_.host) {
    limited([&] {
      state_->update([&](JobState& job) {
        member_->contribute(job);
        remove(job, self_.id, *channel_.leaving());
      });
      connection_.store().erase(beat_key(self_.id));
    });
    return;
  }
  member_->set_closing(ExitStatus::kSetup, fmt::format("node {}, which serves the rendezvous, {}",
                                                       describe(self_), *channel_.leaving()));
  tick();
  finish();
}

/// Who knows that the job is over takes itself out; the host stays until all others have.
void Agent::finish() {
  if (!self_.host) {
    limited([&] { state_->update([&](JobState& job) { remove(job, self_.id, ""); }); });
    return;
  }
  const auto until = Clock::now() + options_.close_timeout;
  const auto gone_until = Clock::now() + kParting;
  while (Clock::now() < (channel_.gone() ? gone_until : until)) {
    exchange_beats();
    const JobState state = limited([&] {
      return state_->update([&](JobState& job) { coordinator_->step(job, Clock::now()); });
    });
    if (state.nodes.size() <= 1) return;
    channel_.listen(kPoll / 5);
    take_messages();
  }
}

std::string lost_text(const ElasticOptions& options, const std::string& why) {
  return fmt::format(
      "the rendezvous at {} is lost: {}\n"
      "The node that serves it has ended, or cannot be reached: see what its launcher says.",
      options.endpoint(), why);
}

}  // namespace

void run_agent(const Job& job, const std::string& plugin, UniqueFd link) {
  const ElasticOptions& options = *job.options.elastic;
  const int socket = link.get();
  FromAgent lost;
  lost.kind = FromAgent::Kind::kLost;
  const double patience = std::chrono::duration<double>(options.read_timeout).count();
  lost.text = lost_text(
      options, fmt::format("it did not answer within {:g} s (--rdzv_conf read_timeout)", patience));
  CallLimit::set_last_words(socket, encode(lost));
  // What LibTorch warns of is said by the launcher, in a line.
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*replace=*/0);
  try {
    Agent(job, plugin, link.get()).run();
    return;
  } catch (const StoreError& error) {
    lost.text = lost_text(options, error.what());
  } catch (const std::exception& error) {
    lost.text = error.what();
  }
  send_message(socket, encode(lost));
}

}  // namespace ddp::launcher
