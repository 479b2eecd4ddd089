#pragma once

#include <optional>
#include <string>

#include <launcher/elastic/job_state.h>

namespace ddp::launcher {

/// What one agent makes of the state (see Note [Elastic state]): what it adds to it for itself, and
/// what its launcher is to do. Pure; no two events are the same, whatever is read how often.
class Member {
 public:
  struct Event {
    enum class Kind {
      kNothing,
      kBegin,    ///< start the workers of the state's round
      kRestart,  ///< stop them, and join again: the state's reason says why
      kClosed,   ///< stop them, and end as the state says
      kWaiting,  ///< the job is full, or ends soon: this node waits for a place
    };
    Kind kind = Kind::kNothing;
    std::string reason;
  };

  explicit Member(std::string id) : id_(std::move(id)) {}

  /// The launcher has no workers and wants to have them: `node` is to join.
  void want(Node node);

  /// It is about to leave: whoever has not joined yet does not begin a round for that.
  void want_no_more() { wanted_.reset(); }

  /// Its workers have all ended with 0 in this round.
  void set_done(int round) { done_ = round; }

  /// One of its workers has failed.
  void set_failed(int round, WorkerFailure failure, bool final);

  /// The job is to end for all.
  void set_closing(int status, std::string why);

  /// Brings into the state what was said above, as far as it is not there.
  void contribute(JobState& state) const;

  /// What the state means that was read, or written with all contributions. To be called once for
  /// each.
  Event look(const JobState& state);

  /// The job is over, and kClosed was given.
  bool closed() const { return closed_; }

 private:
  struct Failed {
    int round;
    WorkerFailure failure;
    bool final;
  };
  struct Closing {
    int status;
    std::string why;
  };

  std::string id_;
  std::optional<Node> wanted_;
  std::optional<int> engaged_;  ///< the round that the launcher was told to begin, while it runs
  std::optional<int> done_;
  std::optional<Failed> failed_;
  std::optional<Closing> closing_;
  bool waiting_told_ = false;
  bool closed_ = false;
};

}  // namespace ddp::launcher
