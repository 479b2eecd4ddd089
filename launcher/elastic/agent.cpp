#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include <launcher/address.h>
#include <launcher/elastic/agent.h>
#include <launcher/elastic/agent_messages.h>
#include <launcher/elastic/call_limit.h>
#include <launcher/elastic/coordinator.h>
#include <launcher/elastic/fields.h>
#include <launcher/elastic/member.h>
#include <launcher/elastic/shared_state.h>
#include <launcher/elastic/store_plugin.h>
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
constexpr milliseconds kRetry{200};
/// The launcher has gone, and somebody may wait for the last of its processes.
constexpr milliseconds kParting{2000};
constexpr milliseconds kSayAfter{5000};

std::string beat_key(const std::string& id) { return "ddp/elastic/beat/" + id; }

/// The agent cannot go on; what() is for the user.
class Lost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

UniqueFd open_socket(int family, int type) {
  return UniqueFd(::socket(family, type | SOCK_CLOEXEC, 0));
}

bool is_own_address(Address address) {
  address.set_port(0);
  const UniqueFd fd = open_socket(address.family(), SOCK_STREAM);
  return fd && ::bind(fd.get(), address.get(), address.length) == 0;
}

/// This machine's address on its route to `address`; nothing is sent.
std::string address_toward(const Address& address) {
  const UniqueFd fd = open_socket(address.family(), SOCK_DGRAM);
  Address own;
  own.length = sizeof(own.storage);
  if (!fd || ::connect(fd.get(), address.get(), address.length) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0) {
    return {};
  }
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes =
      own.family() == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<sockaddr_in6&>(own.storage).sin6_addr)
          : static_cast<const void*>(&reinterpret_cast<sockaddr_in&>(own.storage).sin_addr);
  return ::inet_ntop(own.family(), bytes, text, sizeof(text)) != nullptr ? text : "";
}

/// Whether somebody listens there.
bool answers(const Address& address, milliseconds patience) {
  const UniqueFd fd = open_socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK);
  if (!fd) return false;
  if (::connect(fd.get(), address.get(), address.length) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd ready{fd.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

class Agent {
 public:
  Agent(const Job& job, const std::string& plugin, int link)
      : job_(job), options_(*job.options.elastic), plugin_(plugin), link_(link) {}

  void run();

 private:
  bool listen(milliseconds time);
  void say(FromAgent message) const;
  void take_messages();
  void handle(const ToAgent& message);

  bool connect();
  bool join_store(const Address& address, Clock::time_point deadline);
  void become_host();
  void check_identity();
  void describe_self(const Address& address);

  void work();
  void tick();
  void exchange_beats();
  void tell(const Member::Event& event, const JobState& state);
  void say_who_is_missing(const JobState& state);
  void check_settings(const JobState& state) const;
  void leave();
  void finish();

  template <typename Call>
  auto limited(const Call& call) const {
    const CallLimit limit(gone_ ? kParting : options_.read_timeout);
    return call();
  }

  const Job& job_;
  const ElasticOptions& options_;
  StorePlugin plugin_;
  int link_;
  std::deque<ToAgent> messages_;
  bool gone_ = false;                   ///< the launcher has
  std::optional<std::string> leaving_;  ///< how

  std::unique_ptr<Store> store_;
  std::optional<SharedState> state_;
  std::optional<Coordinator> coordinator_;  ///< on the host
  std::optional<Member> member_;
  Node self_;
  int node_rank_ = 0;
  size_t nodes_ = 1;  ///< when last seen
  Clock::time_point next_beat_;
  std::optional<Clock::time_point> waiting_since_;
};

void Agent::say(FromAgent message) const { send_message(link_, encode(message)); }

/// Takes what the launcher says within `time`; at once when there is something. False once this
/// node is to leave.
bool Agent::listen(milliseconds time) {
  pollfd ready{link_, POLLIN, 0};
  if (!gone_ && messages_.empty()) ::poll(&ready, 1, static_cast<int>(time.count()));
  while (!gone_) {
    const auto text = receive_message(link_);
    if (text && text->empty()) break;
    if (!text) {
      gone_ = true;
      leaving_ = "has left the job: its launcher was killed";
      break;
    }
    messages_.push_back(decode_to_agent(*text));
    if (messages_.back().kind == ToAgent::Kind::kLeave) leaving_ = messages_.back().text;
  }
  return !leaving_;
}

void Agent::run() {
  if (!connect()) return;
  work();
}

bool Agent::connect() {
  const Address address = [&] {
    Address found = resolve(options_.host, "--rdzv_endpoint",
                            std::chrono::ceil<std::chrono::seconds>(options_.join_timeout));
    found.set_port(options_.port);
    return found;
  }();
  const auto deadline = Clock::now() + options_.join_timeout;
  if (options_.is_host.value_or(is_own_address(address))) {
    store_ = limited([&] { return plugin_.serve(options_.port, options_.read_timeout); });
    if (store_ == nullptr && options_.is_host.has_value()) {
      throw Lost(
          fmt::format("cannot serve the rendezvous at {}: the port is in use by another "
                      "process\nGive another port in --rdzv_endpoint, on all nodes.",
                      options_.endpoint()));
    }
  }
  if (store_ != nullptr) {
    self_.host = true;
    FromAgent host;
    host.kind = FromAgent::Kind::kHost;
    say(host);
    describe_self(address);
    become_host();
    return true;
  }
  if (!join_store(address, deadline)) return false;
  describe_self(address);
  check_identity();
  return true;
}

/// The host may start later than this node. False where this node is to leave meanwhile.
bool Agent::join_store(const Address& address, Clock::time_point deadline) {
  const auto say_at = Clock::now() + kSayAfter;
  bool said = false;
  while (true) {
    if (!listen(milliseconds(0))) return false;
    if (answers(address, kRetry)) break;
    if (Clock::now() >= deadline) {
      throw Lost(fmt::format(
          "nobody serves the rendezvous at {} within {:g} s (--rdzv_conf "
          "join_timeout)\nOn the node that has the endpoint's address a launcher serves "
          "it; where that node does not know itself by this name, give it --rdzv_conf "
          "is_host=1.",
          options_.endpoint(), std::chrono::duration<double>(options_.join_timeout).count()));
    }
    if (!said && Clock::now() >= say_at) {
      FromAgent waiting;
      waiting.text =
          fmt::format("waiting for the node that serves the rendezvous at {}", options_.endpoint());
      say(waiting);
      said = true;
    }
    pollfd ready{link_, POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(kRetry.count()));
  }
  store_ =
      limited([&] { return plugin_.join(options_.host, options_.port, options_.read_timeout); });
  return true;
}

void Agent::describe_self(const Address& address) {
  // The others reach the host by the endpoint, whatever its own resolver makes of the name.
  self_.address = !job_.options.local_addr.empty() ? job_.options.local_addr
                  : self_.host                     ? options_.host
                                                   : address_toward(address);
  if (self_.address.empty()) {
    throw Lost(
        fmt::format("this machine has no route to {}: give its own address with --local_addr",
                    options_.endpoint()));
  }
  self_.pid = ::getppid();
  self_.workers = job_.options.nproc_per_node;
  self_.id = fmt::format("{}/{}/{}", self_.address, self_.pid, make_run_id());
  member_.emplace(self_.id);
}

void Agent::become_host() {
  state_.emplace(*store_, kStateKey);
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
    store_->set(kIdentityKey, FieldWriter().text(kIdentity).text(job_.run_id).str());
  });
}

void Agent::check_identity() {
  const std::string text = limited([&] {
    if (!store_->wait(kIdentityKey, options_.read_timeout / 2)) return std::string();
    return store_->get(kIdentityKey).value_or("");
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
    throw Lost(fmt::format(
        "the store at {} is none of this launcher's (torchrun's own agents cannot take part)\nGive "
        "another port in --rdzv_endpoint, on all nodes.",
        options_.endpoint()));
  }
  if (run_id != job_.run_id) {
    throw Lost(
        fmt::format("the rendezvous at {} is that of another job: its --rdzv_id is '{}', and "
                    "this one's '{}'",
                    options_.endpoint(), run_id, job_.run_id));
  }
  state_.emplace(*store_, kStateKey);
}

void Agent::check_settings(const JobState& state) const {
  if (state.least == options_.least && state.most == options_.most &&
      state.max_restarts == job_.options.max_restarts) {
    return;
  }
  throw Lost(
      fmt::format("the host of this job has --nnodes={}:{} --max_restarts={}, and this node "
                  "--nnodes={}:{} --max_restarts={}: give the same on all nodes",
                  state.least, state.most, state.max_restarts, options_.least, options_.most,
                  job_.options.max_restarts));
}

void Agent::take_messages() {
  for (; !messages_.empty(); messages_.pop_front()) handle(messages_.front());
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

void Agent::work() {
  if (!self_.host) check_settings(limited([&] { return state_->update([](JobState&) {}); }));
  while (true) {
    const bool stay = listen(kPoll * static_cast<int>(1 + nodes_ / kNodesAtPace));
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
      store_->add(beat_key(self_.id), 1);
      return;
    }
    for (const Node& node : state_->update([](JobState&) {}).nodes)
      coordinator_->heard(node.id, store_->add(beat_key(node.id), 0), now);
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
  say(message);
}

void Agent::say_who_is_missing(const JobState& state) {
  if (!waiting_since_ || Clock::now() < *waiting_since_ + kSayAfter) return;
  waiting_since_.reset();
  if (state.phase != JobState::Phase::kForming) return;
  FromAgent message;
  message.text =
      fmt::format("waiting for more nodes: {} of {} have joined", state.joined(),
                  state.least == state.most ? std::to_string(state.most)
                                            : fmt::format("{} to {}", state.least, state.most));
  say(message);
}

/// Without the host there is no store and so no job; without another node there may be.
void Agent::leave() {
  if (!self_.host) {
    limited([&] {
      state_->update([&](JobState& job) {
        member_->contribute(job);
        remove(job, self_.id, *leaving_);
      });
      store_->erase(beat_key(self_.id));
    });
    return;
  }
  member_->set_closing(ExitStatus::kSetup, fmt::format("node {}, which serves the rendezvous, {}",
                                                       describe(self_), *leaving_));
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
  while (Clock::now() < (gone_ ? gone_until : until)) {
    exchange_beats();
    const JobState state = limited([&] {
      return state_->update([&](JobState& job) { coordinator_->step(job, Clock::now()); });
    });
    if (state.nodes.size() <= 1) return;
    listen(kPoll / 5);
    messages_.clear();
    if (gone_) ::poll(nullptr, 0, static_cast<int>(kPoll.count() / 5));
  }
}

std::string lost_text(const ElasticOptions& options, const std::string& why) {
  return fmt::format(
      "the rendezvous at {} is lost: {}\nThe node that serves it has ended, or cannot be reached: "
      "see "
      "what its launcher says.",
      options.endpoint(), why);
}

}  // namespace

void run_agent(const Job& job, const std::string& plugin, UniqueFd link) {
  const ElasticOptions& options = *job.options.elastic;
  const int socket = link.get();
  FromAgent lost;
  lost.kind = FromAgent::Kind::kLost;
  lost.text =
      lost_text(options, fmt::format("it did not answer within {:g} s (--rdzv_conf "
                                     "read_timeout)",
                                     std::chrono::duration<double>(options.read_timeout).count()));
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
