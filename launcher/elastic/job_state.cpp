#include <algorithm>
#include <stdexcept>
#include <tuple>

#include <fmt/format.h>

#include <launcher/elastic/fields.h>
#include <launcher/elastic/job_state.h>

namespace ddp::launcher {
namespace {

using Phase = JobState::Phase;

constexpr int kFormat = 1;
constexpr size_t kMostFailures = 8;

/// Every agent stops its workers and joins again.
void end_round(JobState& state, const std::string& why) {
  state.phase = Phase::kForming;
  state.reason = why;
  state.gathering = static_cast<int>(state.nodes.size()) < state.least;
  for (Node& node : state.nodes) {
    if (node.member) node.joined = false;
    node.done = false;
  }
}

bool any_done(const JobState& state) {
  return std::any_of(state.nodes.begin(), state.nodes.end(),
                     [](const Node& node) { return node.done; });
}

void close_if_all_done(JobState& state) {
  const bool all = std::all_of(state.nodes.begin(), state.nodes.end(),
                               [](const Node& node) { return !node.member || node.done; });
  if (all) close(state, 0, "all workers have ended with 0");
}

void write(FieldWriter& out, const Node& node) {
  out.text(node.id).text(node.address).number(node.pid).number(node.workers).number(node.port);
  out.flag(node.host).flag(node.joined).flag(node.member).flag(node.done);
}

Node read_node(FieldReader& in) {
  Node node;
  node.id = in.text();
  node.address = in.text();
  node.pid = in.number();
  node.workers = in.integer();
  node.port = in.integer();
  node.host = in.flag();
  node.joined = in.flag();
  node.member = in.flag();
  node.done = in.flag();
  return node;
}

void write(FieldWriter& out, const WorkerFailure& failure) {
  out.text(failure.address).number(failure.node_rank).number(failure.rank);
  out.number(failure.local_rank).number(failure.pid).number(failure.status).text(failure.how);
}

WorkerFailure read_failure(FieldReader& in) {
  WorkerFailure failure;
  failure.address = in.text();
  failure.node_rank = in.integer();
  failure.rank = in.integer();
  failure.local_rank = in.integer();
  failure.pid = in.number();
  failure.status = in.integer();
  failure.how = in.text();
  return failure;
}

}  // namespace

const Node* JobState::find(const std::string& id) const {
  const auto found =
      std::find_if(nodes.begin(), nodes.end(), [&](const Node& node) { return node.id == id; });
  return found == nodes.end() ? nullptr : &*found;
}

Node* JobState::find(const std::string& id) {
  return const_cast<Node*>(static_cast<const JobState*>(this)->find(id));
}

int JobState::joined() const {
  return static_cast<int>(
      std::count_if(nodes.begin(), nodes.end(), [](const Node& node) { return node.joined; }));
}

int JobState::members() const {
  return static_cast<int>(
      std::count_if(nodes.begin(), nodes.end(), [](const Node& node) { return node.member; }));
}

Placement JobState::placement_of(const std::string& id) const {
  Placement placement;
  placement.nnodes = members();
  placement.world_size = 0;
  for (int rank = 0; rank < placement.nnodes; ++rank) {
    const Node& node = nodes[static_cast<size_t>(rank)];
    if (node.id == id) {
      placement.node_rank = rank;
      placement.first_rank = placement.world_size;
    }
    placement.world_size += node.workers;
  }
  return placement;
}

std::string encode(const JobState& state) {
  FieldWriter out;
  out.number(kFormat).number(state.least).number(state.most).number(state.max_restarts);
  out.number(static_cast<int64_t>(state.version)).number(static_cast<int>(state.phase));
  out.number(state.round).number(state.restarts).flag(state.gathering);
  out.number(static_cast<int64_t>(state.nodes.size()));
  for (const Node& node : state.nodes) write(out, node);
  out.number(static_cast<int64_t>(state.failures.size()));
  for (const WorkerFailure& failure : state.failures) write(out, failure);
  out.text(state.reason).number(state.status);
  return out.str();
}

JobState decode_job_state(const std::string& text) {
  FieldReader in(text);
  if (in.number() != kFormat) throw std::invalid_argument("the state is of another version");
  JobState state;
  state.least = in.integer();
  state.most = in.integer();
  state.max_restarts = in.integer();
  state.version = static_cast<uint64_t>(in.number());
  const int phase = in.integer();
  if (phase < 0 || phase > static_cast<int>(Phase::kClosed))
    throw std::invalid_argument("the state has an unknown phase");
  state.phase = static_cast<Phase>(phase);
  state.round = in.integer();
  state.restarts = in.integer();
  state.gathering = in.flag();
  for (size_t left = in.count(); left > 0; --left) state.nodes.push_back(read_node(in));
  for (size_t left = in.count(); left > 0; --left) state.failures.push_back(read_failure(in));
  state.reason = in.text();
  state.status = in.integer();
  if (!in.at_end()) throw std::invalid_argument("the state is longer than it should be");
  return state;
}

void join(JobState& state, const Node& node) {
  if (state.phase == Phase::kClosed) return;
  const bool running = state.phase == Phase::kRunning;
  Node* known = state.find(node.id);
  if (known != nullptr && (known->joined || (running && known->member))) return;
  if (known == nullptr) {
    state.nodes.push_back(node);
    known = &state.nodes.back();
    known->member = false;
    known->done = false;
  }
  known->joined = true;
  known->port = node.port;
  if (running && state.members() < state.most && !any_done(state))
    end_round(state, fmt::format("node {} has joined", describe(node)));
}

void remove(JobState& state, const std::string& id, const std::string& why) {
  const Node* known = state.find(id);
  if (known == nullptr) return;
  const Node node = *known;
  std::erase_if(state.nodes, [&](const Node& each) { return each.id == id; });
  switch (state.phase) {
    case Phase::kForming:
      if (static_cast<int>(state.nodes.size()) < state.least) state.gathering = true;
      break;
    case Phase::kRunning:
      if (!node.member) break;
      if (!node.done) {
        end_round(state, fmt::format("node {} {}", describe(node), why));
      } else {
        close_if_all_done(state);
      }
      break;
    case Phase::kClosed:
      break;
  }
}

void report_done(JobState& state, const std::string& id, int round) {
  Node* node = state.find(id);
  if (state.phase != Phase::kRunning || state.round != round || node == nullptr || !node->member)
    return;
  node->done = true;
  close_if_all_done(state);
}

void report_failure(JobState& state, int round, const WorkerFailure& failure, bool final) {
  if (state.round != round) return;
  if (state.phase != Phase::kRunning) {
    // It came after another one that ended the round.
    if (!state.failures.empty() && state.failures.size() < kMostFailures)
      state.failures.push_back(failure);
    return;
  }
  state.failures = {failure};
  if (final || state.restarts >= state.max_restarts) {
    close(state, failure.status, describe(failure));
    return;
  }
  ++state.restarts;
  end_round(state, fmt::format("{} (restart {} of {})", describe(failure), state.restarts,
                               state.max_restarts));
}

void close(JobState& state, int status, const std::string& why) {
  if (state.phase == Phase::kClosed) return;
  state.phase = Phase::kClosed;
  state.status = status;
  state.reason = why;
}

void begin_round(JobState& state) {
  std::vector<Node> chosen;
  std::vector<Node> others;
  for (const Node& node : state.nodes) (node.joined ? chosen : others).push_back(node);
  std::stable_sort(chosen.begin(), chosen.end(), [](const Node& a, const Node& b) {
    return std::make_tuple(!a.host, !a.member) < std::make_tuple(!b.host, !b.member);
  });
  if (static_cast<int>(chosen.size()) > state.most) {
    others.insert(others.end(), chosen.begin() + state.most, chosen.end());
    chosen.resize(static_cast<size_t>(state.most));
  }
  // Nodes that stay keep their order, whoever comes and goes.
  std::sort(chosen.begin(), chosen.end(), [](const Node& a, const Node& b) {
    return std::tie(b.host, a.address, a.pid, a.id) < std::tie(a.host, b.address, b.pid, b.id);
  });
  for (Node& node : chosen) node.member = true;
  for (Node& node : others) node.member = false;
  state.nodes = std::move(chosen);
  state.nodes.insert(state.nodes.end(), others.begin(), others.end());
  for (Node& node : state.nodes) node.done = false;
  state.phase = Phase::kRunning;
  state.gathering = false;
  state.failures.clear();
  ++state.round;
}

std::string describe(const WorkerFailure& failure) {
  return fmt::format("rank {} (local rank {}, pid {}) on node {} ({}) {}", failure.rank,
                     failure.local_rank, failure.pid, failure.node_rank, failure.address,
                     failure.how);
}

std::string describe(const Node& node) {
  return fmt::format("{} (pid {})", node.address, node.pid);
}

}  // namespace ddp::launcher
