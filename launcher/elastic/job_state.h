#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <launcher/placement.h>

namespace ddp::launcher {

// Note [Elastic state]
// The launchers of an elastic job (agents, one a node) share one value in a store that one of them
// serves, the host. Each reads it several times a second and changes it by compare-and-set: it
// reads the value, applies one of the functions below, and writes the result if nobody has written
// meanwhile, else it begins again. So the functions are the whole protocol, and need no store.
//
//   forming --(all known nodes have joined, MIN or more, see Coordinator)--> running
//   running --(a worker failed and restarts are left; a node came, left or is dead)--> forming
//   running --(all members are done; a worker failed and no restart is left)--> closed
//   any     --(the host ends; MIN nodes do not come)--> closed
//
// A *round* is one attempt of all workers. What an agent reports about a round that is over changes
// nothing: when the loss of one worker makes the others fail, one restart is used up, not one for
// each. While a round forms an agent stops its workers and joins again, with a fresh port; rank 0's
// is the round's. So nobody meets what is left of an earlier round, and whoever gets rank 0 serves.
// Decisions that need a clock are the host's alone (Coordinator): clocks are never compared.

/// One agent and what it brings.
struct Node {
  std::string id;       ///< unique among all agents that ever are
  std::string address;  ///< where other nodes reach it: MASTER_ADDR if it gets rank 0
  int64_t pid = 0;
  int workers = 0;
  int port = 0;         ///< reserved on it for the round it joins: MASTER_PORT if it gets rank 0
  bool host = false;    ///< serves the store
  bool joined = false;  ///< has no workers and is ready for the next round
  bool member = false;  ///< of the running round, or while one forms of the last
  bool done = false;    ///< its workers have all ended with 0 in this round

  bool operator==(const Node&) const = default;
};

/// A worker that failed.
struct WorkerFailure {
  std::string address;  ///< of its node
  int node_rank = 0;
  int rank = 0;
  int local_rank = 0;
  int64_t pid = 0;
  int status = 0;   ///< as a shell gives it
  std::string how;  ///< "exited with code 7"

  bool operator==(const WorkerFailure&) const = default;
};

struct JobState {
  enum class Phase { kForming, kRunning, kClosed };

  int least = 1;  ///< nodes
  int most = 1;
  int max_restarts = 0;

  uint64_t version = 0;  ///< of the value; raised by each write
  Phase phase = Phase::kForming;
  int round = -1;           ///< the running one or, while one forms, the last; -1: none yet
  int restarts = 0;         ///< failures so far: TORCHELASTIC_RESTART_COUNT
  bool gathering = true;    ///< forming: nodes are missing, so stragglers are waited for
  std::vector<Node> nodes;  ///< running: the members first, in the order of node ranks
  std::vector<WorkerFailure> failures;  ///< of the last round that failed, the first one first
  std::string reason;                   ///< why the last round ended, or the job
  int status = 0;                       ///< closed: the job's exit status

  bool operator==(const JobState&) const = default;

  const Node* find(const std::string& id) const;
  Node* find(const std::string& id);
  int joined() const;
  int members() const;
  /// Of a member of the running round.
  Placement placement_of(const std::string& id) const;
};

/// See Note [Elastic encoding]. decode throws std::invalid_argument.
std::string encode(const JobState& state);
JobState decode_job_state(const std::string& text);

/// The node is there and ready for the next round. While one runs it ends it, unless the job is
/// full (the node waits for a place then) or some members are done already.
void join(JobState& state, const Node& node);

/// The node is gone. `why` says how, with its address: "has left the job (SIGTERM)". A running
/// round ends with it, unless the node's workers were done.
void remove(JobState& state, const std::string& id, const std::string& why);

/// All workers of a node have ended with 0 in this round. The last member's report closes the job.
void report_done(JobState& state, const std::string& id, int round);

/// A worker failed in this round: another begins, or the job is closed. `final`: it would fail
/// again.
void report_failure(JobState& state, int round, const WorkerFailure& failure, bool final);

/// Ends the job for all. One that is closed stays as it is.
void close(JobState& state, int status, const std::string& why);

/// Begins the next round with those who have joined, at most as many as may be: the host and who
/// was in the last round before others.
void begin_round(JobState& state);

/// "rank 3 (local rank 1, pid 77) on node 1 (10.0.0.2) exited with code 7".
std::string describe(const WorkerFailure& failure);

/// "10.0.0.2 (pid 77)".
std::string describe(const Node& node);

}  // namespace ddp::launcher
