#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <launcher/elastic/coordinator.h>
#include <launcher/error.h>

namespace ddp::launcher {
namespace {

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

std::string names(const JobState& state) {
  std::vector<std::string> all;
  for (const Node& node : state.nodes) all.push_back(describe(node));
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace

void Coordinator::heard(const std::string& id, int64_t beats, Time now) {
  Life& life = lives_[id];
  if (life.beats == beats) return;
  life = {beats, now};
}

void Coordinator::step(JobState& state, Time now) {
  skip_pause(now);
  remove_dead(state, now);
  if (state.phase == JobState::Phase::kForming) {
    form(state, now);
  } else {
    missing_since_.reset();
    enough_since_.reset();
  }
}

void Coordinator::skip_pause(Time now) {
  const auto passed = last_step_ ? now - *last_step_ : Clock::duration(0);
  last_step_ = now;
  if (passed <= kMostPause) return;
  for (auto& [id, life] : lives_) life.since += passed;
  if (missing_since_) *missing_since_ += passed;
  if (enough_since_) *enough_since_ += passed;
}

void Coordinator::remove_dead(JobState& state, Time now) {
  std::erase_if(lives_, [&](const auto& each) { return state.find(each.first) == nullptr; });
  std::vector<std::string> dead;
  for (const Node& node : state.nodes) {
    if (node.id == self_) continue;
    const Life& life = lives_.try_emplace(node.id, Life{-1, now}).first->second;
    if (now - life.since > times_.keep_alive) dead.push_back(node.id);
  }
  for (const std::string& id : dead) {
    remove(state, id,
           fmt::format("is dead, or cannot be reached: it gave no sign of life for {:g} s",
                       seconds(times_.keep_alive)));
  }
}

void Coordinator::form(JobState& state, Time now) {
  const int joined = state.joined();
  if (joined < state.least) {
    enough_since_.reset();
    if (!missing_since_) missing_since_ = now;
    if (now - *missing_since_ >= times_.join) {
      close(state, ExitStatus::kSetup,
            fmt::format("{} of at least {} nodes came within {:g} s (--rdzv_conf join_timeout): {}",
                        joined, state.least, seconds(times_.join), names(state)));
    }
    return;
  }
  missing_since_.reset();
  if (!enough_since_) enough_since_ = now;
  // Known nodes are stopping their workers: a round without them would be ended by their coming.
  if (joined < static_cast<int>(state.nodes.size())) return;
  if (joined < state.most && state.gathering && now - *enough_since_ < times_.last_call) return;
  begin_round(state);
  enough_since_.reset();
}

}  // namespace ddp::launcher
