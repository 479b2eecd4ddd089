// The rules of elastic jobs, without a store, processes or clocks: states, what changes them, and
// what an agent makes of them.

#include <sys/socket.h>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <launcher/elastic/agent_messages.h>
#include <launcher/elastic/coordinator.h>
#include <launcher/elastic/fields.h>
#include <launcher/elastic/job_state.h>
#include <launcher/elastic/member.h>
#include <launcher/elastic/shared_state.h>
#include <launcher/unique_fd.h>

#include "catch2.h"

using namespace ddp::launcher;
using namespace std::chrono_literals;
using Phase = JobState::Phase;
using Kind = Member::Event::Kind;

namespace {

Node node(const std::string& id, int workers = 2, bool host = false) {
  Node made;
  made.id = id;
  made.address = "10.0.0." + id;
  made.pid = 100;
  made.workers = workers;
  made.port = 4000;
  made.host = host;
  return made;
}

Node host() { return node("9", 2, true); }

JobState job(int least, int most, int max_restarts = 3) {
  JobState state;
  state.least = least;
  state.most = most;
  state.max_restarts = max_restarts;
  return state;
}

/// A running job of these nodes, the host first.
JobState running(int least, int most, const std::vector<Node>& nodes, int max_restarts = 3) {
  JobState state = job(least, most, max_restarts);
  for (const Node& each : nodes) join(state, each);
  begin_round(state);
  return state;
}

WorkerFailure failure(int rank, int status = 7) {
  WorkerFailure made;
  made.address = "10.0.0.1";
  made.node_rank = 1;
  made.rank = rank;
  made.pid = 55;
  made.status = status;
  made.how = "exited with code " + std::to_string(status);
  return made;
}

std::vector<std::string> ids(const JobState& state) {
  std::vector<std::string> all;
  for (const Node& each : state.nodes) all.push_back(each.id);
  return all;
}

/// All agents of a forming round have stopped their workers.
void join_all(JobState& state) {
  for (const Node& each : std::vector<Node>(state.nodes)) join(state, each);
}

/// A host's clock that a test moves.
struct Watch {
  Coordinator coordinator{"9", {.join = 60s, .last_call = 30s, .keep_alive = 15s}};
  Coordinator::Time now{};
  std::map<std::string, int64_t> beats;

  /// Time passes, and these nodes give signs of life meanwhile.
  void pass(std::chrono::milliseconds time, JobState& state,
            const std::vector<std::string>& alive = {}) {
    for (const auto end = now + time; now < end;) {
      now += 500ms;
      for (const std::string& id : alive) ++beats[id];
      for (const Node& each : state.nodes) coordinator.heard(each.id, beats[each.id], now);
      coordinator.step(state, now);
    }
  }
  void look(JobState& state) { coordinator.step(state, now); }
};

}  // namespace

TEST_CASE("elastic: ranks follow from who is there, the host first, and not from when they came") {
  JobState state = running(2, 4, {node("3", 1), host(), node("1", 4), node("2", 2)});
  CHECK(ids(state) == std::vector<std::string>{"9", "1", "2", "3"});
  CHECK(state.placement_of("9").node_rank == 0);
  const Placement second = state.placement_of("2");
  CHECK(second.node_rank == 2);
  CHECK(second.nnodes == 4);
  CHECK(second.first_rank == 6);
  CHECK(second.world_size == 9);
  CHECK(second.rank(1) == 7);
  // A node leaves, another comes: who stays keeps the order.
  remove(state, "1", "has left");
  join_all(state);
  join(state, node("0", 1));
  begin_round(state);
  CHECK(ids(state) == std::vector<std::string>{"9", "0", "2", "3"});
  CHECK(state.round == 1);
}

TEST_CASE("elastic: nodes with one address are told apart by process and id") {
  JobState state = job(3, 3);
  for (const auto& [id, pid] : {std::pair<std::string, int>{"c", 7}, {"b", 8}, {"a", 8}}) {
    Node each = node(id);
    each.address = "127.0.0.1";
    each.pid = pid;
    join(state, each);
  }
  begin_round(state);
  CHECK(ids(state) == std::vector<std::string>{"c", "a", "b"});
}

TEST_CASE("elastic: a failure begins another round for all, and uses up one restart") {
  JobState state = running(2, 2, {host(), node("1")});
  report_done(state, "9", 0);
  report_failure(state, 0, failure(3), false);
  CHECK(state.phase == Phase::kForming);
  CHECK(state.restarts == 1);
  CHECK(state.joined() == 0);
  CHECK_FALSE(state.find("9")->done);
  CHECK_THAT(state.reason, ContainsSubstring("rank 3"));
  CHECK_THAT(state.reason, ContainsSubstring("restart 1 of 3"));
  // The others fail because of it, and report it late.
  report_failure(state, 0, failure(0, 1), false);
  CHECK(state.restarts == 1);
  CHECK(state.failures.size() == 2);
  CHECK(state.failures.front().rank == 3);
  join_all(state);
  begin_round(state);
  report_failure(state, 0, failure(1), false);
  CHECK(state.phase == Phase::kRunning);
  CHECK(state.restarts == 1);
  CHECK(state.failures.empty());
}

TEST_CASE("elastic: without restarts left a failure closes the job for all") {
  JobState state = running(2, 2, {host(), node("1")}, 1);
  report_failure(state, 0, failure(3), false);
  join_all(state);
  begin_round(state);
  report_failure(state, 1, failure(2, 9), false);
  CHECK(state.phase == Phase::kClosed);
  CHECK(state.status == 9);
  CHECK_THAT(state.reason, ContainsSubstring("rank 2 (local rank 0, pid 55) on node 1 (10.0.0.1)"));
  close(state, 0, "later");
  CHECK(state.status == 9);

  JobState unstartable = running(1, 2, {host()});
  report_failure(unstartable, 0, failure(0, 126), /*final=*/true);
  CHECK(unstartable.phase == Phase::kClosed);
  CHECK(unstartable.status == 126);
}

TEST_CASE("elastic: the job is done when all members are, whoever else waits") {
  JobState state = running(1, 2, {host(), node("1")});
  join(state, node("2"));
  report_done(state, "1", 0);
  report_done(state, "1", 0);
  report_done(state, "2", 0);
  CHECK(state.phase == Phase::kRunning);
  report_done(state, "9", 5);
  CHECK(state.phase == Phase::kRunning);
  report_done(state, "9", 0);
  CHECK(state.phase == Phase::kClosed);
  CHECK(state.status == 0);
}

TEST_CASE("elastic: a late node is let in by a restart that costs none, while there is a place") {
  JobState state = running(1, 3, {host(), node("1")});
  join(state, node("2"));
  CHECK(state.phase == Phase::kForming);
  CHECK(state.restarts == 0);
  CHECK(state.joined() == 1);
  CHECK_THAT(state.reason, ContainsSubstring("10.0.0.2 (pid 100) has joined"));
  join_all(state);
  begin_round(state);
  CHECK(state.members() == 3);
  // The job is full.
  join(state, node("3"));
  CHECK(state.phase == Phase::kRunning);
  CHECK(state.members() == 3);
  CHECK(state.nodes.size() == 4);
  // A place becomes free.
  remove(state, "1", "has left");
  CHECK(state.phase == Phase::kForming);
  join_all(state);
  begin_round(state);
  CHECK(ids(state) == std::vector<std::string>{"9", "2", "3"});
  CHECK(state.members() == 3);
}

TEST_CASE("elastic: a job that is ending is not begun again for a late node") {
  JobState state = running(1, 3, {host(), node("1")});
  report_done(state, "1", 0);
  join(state, node("2"));
  CHECK(state.phase == Phase::kRunning);
  report_done(state, "9", 0);
  CHECK(state.phase == Phase::kClosed);
}

TEST_CASE("elastic: with more nodes than places, who was there stays") {
  JobState state = running(1, 2, {host(), node("5")});
  join(state, node("1"));
  report_failure(state, 0, failure(0), false);
  join_all(state);
  begin_round(state);
  CHECK(ids(state) == std::vector<std::string>{"9", "5", "1"});
  CHECK(state.members() == 2);
  // A host that comes later than others has a place all the same: without it there is no job.
  JobState first = job(1, 1);
  join(first, node("1"));
  join(first, host());
  begin_round(first);
  CHECK(first.nodes.front().id == "9");
}

TEST_CASE("elastic: a node that leaves ends the round, unless its work was done") {
  JobState state = running(1, 3, {host(), node("1"), node("2")});
  report_done(state, "1", 0);
  remove(state, "1", "has left");
  CHECK(state.phase == Phase::kRunning);
  remove(state, "nobody", "has left");
  CHECK(state.phase == Phase::kRunning);
  remove(state, "2", "has left the job (SIGTERM)");
  CHECK(state.phase == Phase::kForming);
  CHECK(state.restarts == 0);
  CHECK_THAT(state.reason, ContainsSubstring("10.0.0.2 (pid 100) has left the job (SIGTERM)"));
  // The last one that was awaited leaves after its work was done.
  JobState ending = running(1, 3, {host(), node("1")});
  report_done(ending, "9", 0);
  report_done(ending, "1", 0);
  CHECK(ending.phase == Phase::kClosed);
  remove(ending, "1", "");
  CHECK(ending.nodes.size() == 1);
}

TEST_CASE("elastic: a round begins with MIN nodes once stragglers had their time") {
  JobState state = job(2, 3);
  Watch watch;
  join(state, host());
  watch.pass(29s, state);
  CHECK(state.phase == Phase::kForming);
  join(state, node("1"));
  watch.pass(29s, state, {"1"});
  CHECK(state.phase == Phase::kForming);
  watch.pass(2s, state, {"1"});
  CHECK(state.phase == Phase::kRunning);
  CHECK(state.round == 0);
}

TEST_CASE("elastic: a round begins at once with MAX nodes, and with all that were there before") {
  JobState state = job(1, 3);
  Watch watch;
  for (const Node& each : {host(), node("1"), node("2")}) join(state, each);
  watch.look(state);
  CHECK(state.phase == Phase::kRunning);
  remove(state, "2", "has left");
  // One has not stopped its workers yet: it is waited for as long as it lives.
  join(state, host());
  watch.pass(50s, state, {"1"});
  CHECK(state.phase == Phase::kForming);
  join(state, node("1"));
  watch.look(state);
  CHECK(state.phase == Phase::kRunning);
  CHECK(state.members() == 2);
}

TEST_CASE("elastic: stragglers are waited for again after MIN was lost") {
  JobState state = running(2, 4, {host(), node("1")});
  Watch watch;
  remove(state, "1", "has left");
  join(state, host());
  watch.look(state);
  CHECK(state.gathering);
  join(state, node("2"));
  watch.pass(20s, state, {"2"});
  CHECK(state.phase == Phase::kForming);
  watch.pass(11s, state, {"2"});
  CHECK(state.phase == Phase::kRunning);
  // The same where it is lost only while a round forms.
  report_failure(state, 1, failure(0), false);
  CHECK_FALSE(state.gathering);
  remove(state, "2", "has left");
  CHECK(state.gathering);
}

TEST_CASE("elastic: without MIN nodes the job is given up in the end") {
  JobState state = job(2, 3);
  Watch watch;
  join(state, host());
  watch.pass(59s, state);
  CHECK(state.phase == Phase::kForming);
  watch.pass(2s, state);
  CHECK(state.phase == Phase::kClosed);
  CHECK(state.status == 1);
  CHECK_THAT(state.reason, ContainsSubstring("1 of at least 2 nodes came within 60 s"));
}

TEST_CASE("elastic: a silent node is dead after its keep-alive, and not before") {
  JobState state = running(1, 3, {host(), node("1"), node("2")});
  Watch watch;
  watch.pass(10s, state, {"1", "2"});
  watch.pass(15s, state, {"1"});
  CHECK(state.phase == Phase::kRunning);
  watch.pass(1s, state, {"1"});
  CHECK(state.phase == Phase::kForming);
  CHECK(state.nodes.size() == 2);
  CHECK_THAT(state.reason, ContainsSubstring("10.0.0.2 (pid 100) is dead"));
  CHECK_THAT(state.reason, ContainsSubstring("15 s"));
  // It returns under another id, or the same one: as any late node.
  join_all(state);
  watch.look(state);
  REQUIRE(state.phase == Phase::kRunning);
  join(state, node("2"));
  CHECK(state.phase == Phase::kForming);
}

TEST_CASE("elastic: a host that was stopped holds nothing against the others") {
  JobState state = running(1, 2, {host(), node("1")});
  Watch watch;
  watch.pass(10s, state, {"1"});
  watch.now += 100s;
  watch.look(state);
  CHECK(state.phase == Phase::kRunning);
  watch.pass(16s, state);
  CHECK(state.phase == Phase::kForming);
}

TEST_CASE("elastic: what an agent tells its launcher, once each") {
  Member member("1");
  JobState state = job(1, 2);
  join(state, host());
  CHECK(member.look(state).kind == Kind::kNothing);
  member.want(node("1"));
  member.contribute(state);
  CHECK(state.joined() == 2);
  CHECK(member.look(state).kind == Kind::kNothing);
  begin_round(state);
  CHECK(member.look(state).kind == Kind::kBegin);
  CHECK(member.look(state).kind == Kind::kNothing);

  report_failure(state, 0, failure(0), false);
  const Member::Event restart = member.look(state);
  CHECK(restart.kind == Kind::kRestart);
  CHECK(restart.reason == state.reason);
  CHECK(member.look(state).kind == Kind::kNothing);
  // Its workers are not stopped yet, and what it has to say is about a round that is over.
  member.set_done(0);
  member.contribute(state);
  CHECK(state.joined() == 0);
  member.look(state);
  Node again = node("1");
  again.port = 4001;
  member.want(again);
  member.contribute(state);
  CHECK(state.find("1")->port == 4001);
  member.look(state);
  join(state, host());
  begin_round(state);
  CHECK(member.look(state).kind == Kind::kBegin);
  close(state, 3, "why");
  CHECK(member.look(state).kind == Kind::kClosed);
  CHECK(member.closed());
  CHECK(member.look(state).kind == Kind::kNothing);
}

TEST_CASE("elastic: two rounds that pass between two looks are one restart") {
  Member member("1");
  JobState state = running(1, 3, {host(), node("1")});
  member.want(node("1"));
  REQUIRE(member.look(state).kind == Kind::kBegin);
  remove(state, "1", "is dead");
  join(state, host());
  begin_round(state);
  const Member::Event restart = member.look(state);
  CHECK(restart.kind == Kind::kRestart);
  CHECK_THAT(restart.reason, ContainsSubstring("taken for dead"));
  // The same where it is in the later round all the same.
  Member other("9");
  other.want(host());
  REQUIRE(other.look(state).kind == Kind::kBegin);
  report_failure(state, 1, failure(0), false);
  join_all(state);
  begin_round(state);
  CHECK(other.look(state).kind == Kind::kRestart);
  member.want(node("1"));
  member.contribute(state);
  CHECK(state.phase == Phase::kForming);
  CHECK(member.look(state).kind == Kind::kNothing);
}

TEST_CASE("elastic: a node without a place says so once, and ends with the job") {
  Member member("1");
  JobState state = running(1, 1, {host()});
  member.want(node("1"));
  member.contribute(state);
  CHECK(member.look(state).kind == Kind::kWaiting);
  CHECK(member.look(state).kind == Kind::kNothing);
  report_done(state, "9", 0);
  CHECK(member.look(state).kind == Kind::kClosed);
}

TEST_CASE("elastic: who leaves before he has joined disturbs nobody") {
  Member member("1");
  JobState state = running(1, 2, {host()});
  member.want(node("1"));
  member.want_no_more();
  member.contribute(state);
  remove(state, "1", "has left");
  CHECK(state.phase == Phase::kRunning);
  CHECK(state.nodes.size() == 1);
}

TEST_CASE("elastic: a failure is reported until it is written, and then not again") {
  Member member("1");
  JobState state = running(1, 2, {host(), node("1")});
  member.want(node("1"));
  member.look(state);
  member.set_failed(0, failure(2), false);
  JobState lost = state;
  member.contribute(lost);  // somebody else has written first
  member.contribute(state);
  CHECK(state.restarts == 1);
  CHECK(member.look(state).kind == Kind::kRestart);
  member.contribute(state);
  CHECK(state.failures.size() == 1);
}

TEST_CASE("elastic: states and messages survive their encoding, and nothing else does") {
  JobState state = running(1, 3, {host(), node("1")});
  state.version = 1u << 31;
  state.reason = "4:any\nbytes: 7";
  report_failure(state, 0, failure(1), false);
  state.failures.front().how = std::string("a\0b", 3);
  const std::string text = encode(state);
  CHECK(decode_job_state(text) == state);
  for (size_t size = 0; size < text.size(); ++size)
    CHECK_THROWS_AS(decode_job_state(text.substr(0, size)), std::invalid_argument);
  CHECK_THROWS_AS(decode_job_state(text + "0:"), std::invalid_argument);
  CHECK_THROWS_AS(decode_job_state("1:2" + text.substr(3)), std::invalid_argument);

  ToAgent failed;
  failed.kind = ToAgent::Kind::kFailed;
  failed.round = 4;
  failed.final = true;
  failed.failure = failure(3);
  const ToAgent got = decode_to_agent(encode(failed));
  CHECK(got.kind == ToAgent::Kind::kFailed);
  CHECK(got.round == 4);
  CHECK(got.final);
  CHECK(got.failure.how == failed.failure.how);
  FromAgent begin;
  begin.kind = FromAgent::Kind::kBegin;
  begin.placement = {1, 2, 3, 4};
  begin.port = 65535;
  begin.text = std::string(100000, 'x');
  const FromAgent back = decode_from_agent(encode(begin));
  CHECK(back.placement.world_size == 4);
  CHECK(back.port == 65535);
  CHECK(back.text.size() < begin.text.size());
  CHECK_THROWS_AS(decode_from_agent("x"), std::invalid_argument);
  for (const char* wrong : {"", ":", "1", "2:1", "-1:x", "99999999999999999999:x", "1x:a"})
    CHECK_THROWS_AS(FieldReader(wrong).text(), std::invalid_argument);
}

TEST_CASE("elastic: the last words of a peer that had not read everything arrive") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd here(ends[0]);
  UniqueFd there(ends[1]);
  CHECK(receive_message(here.get()) == std::string());
  CHECK(send_message(here.get(), "never read"));
  CHECK(send_message(there.get(), "first"));
  CHECK(send_message(there.get(), "last"));
  there.reset();
  CHECK(receive_message(here.get()) == std::string("first"));
  CHECK(receive_message(here.get()) == std::string("last"));
  CHECK_FALSE(receive_message(here.get()));
  CHECK_FALSE(send_message(here.get(), "to nobody"));
}

namespace {

/// A store in which others write between a read and a write.
class BusyStore final : public Store {
 public:
  std::map<std::string, std::string> values;
  std::vector<std::string> others;  ///< what they write, one before each of this one's writes
  int writes = 0;

  std::optional<std::string> get(const std::string& key) override {
    const auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  }
  void set(const std::string& key, const std::string& value) override { values[key] = value; }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    ++writes;
    if (!others.empty()) {
      values[key] = others.back();
      others.pop_back();
    }
    if (values[key] == expected) values[key] = desired;
    return values[key];
  }
  int64_t add(const std::string&, int64_t) override { return 0; }
  bool wait(const std::string&, std::chrono::milliseconds) override { return true; }
  void erase(const std::string& key) override { values.erase(key); }
};

}  // namespace

TEST_CASE("elastic: a change is made to what others have written meanwhile") {
  BusyStore store;
  SharedState shared(store, "k");
  CHECK_THROWS_AS(shared.update([](JobState&) {}), StoreError);
  JobState state = job(2, 3);
  shared.create(state);
  join(state, host());
  state.version = 8;
  store.others = {encode(state)};
  const JobState after = shared.update([](JobState& each) { join(each, node("1")); });
  CHECK(store.writes == 2);
  CHECK(after.nodes.size() == 2);
  CHECK(after.version == 9);
  CHECK(decode_job_state(store.values["k"]) == after);
  // Nothing is written where nothing changes.
  shared.update([](JobState& each) { join(each, node("1")); });
  CHECK(store.writes == 2);
  store.values["k"] = "something";
  CHECK_THROWS_AS(shared.update([](JobState&) {}), StoreError);
}
