#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <launcher/elastic/job_state.h>

namespace ddp::launcher {

/// What the host decides by its clock about the state (see Note [Elastic state]): who is dead, when
/// a round begins, when it is no use to wait for nodes any longer. Pure: the time and the others'
/// signs of life are told to it.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  struct Times {
    std::chrono::milliseconds join{600000};       ///< for MIN nodes to come
    std::chrono::milliseconds last_call{30000};   ///< for more of them after that
    std::chrono::milliseconds keep_alive{15000};  ///< a node that is silent for longer is dead
  };

  /// `self` is the host's own id: it is not judged.
  Coordinator(std::string self, Times times) : self_(std::move(self)), times_(times) {}

  /// The number of signs of life that the node has given by now.
  void heard(const std::string& id, int64_t beats, Time now);

  /// Changes the state as it is due at `now`. To be called often; the time between two calls counts
  /// no more than `kMostPause`: a host that was stopped itself has not heard the others, and holds
  /// nothing against them.
  void step(JobState& state, Time now);

  static constexpr std::chrono::milliseconds kMostPause{2000};

 private:
  struct Life {
    int64_t beats = -1;
    Time since;  ///< of the last sign of life
  };

  void skip_pause(Time now);
  void remove_dead(JobState& state, Time now);
  void form(JobState& state, Time now);

  std::string self_;
  Times times_;
  std::map<std::string, Life> lives_;
  std::optional<Time> last_step_;
  std::optional<Time> missing_since_;  ///< fewer than MIN have joined since then
  std::optional<Time> enough_since_;   ///< MIN have joined since then
};

}  // namespace ddp::launcher
