#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <sys/types.h>
#include <vector>

#include <ddp/process_group/shm/arena.h>
#include <ddp/process_group/shm/offer.h>
#include <ddp/process_group/shm/peer.h>

namespace ddp::shm {

using Clock = std::chrono::steady_clock;
/// A timeout beyond is none, and must not overflow the clock.
constexpr std::chrono::hours kLongest(24 * 365);

/// How long a wait turns in a loop before it sleeps.
enum class Patience {
  kShort,  // a thread of the library's own, which takes the processor from the program's
  kLong,   // the program's thread, which has nothing else to do
};

/// The ranks of one group, and the steps that they make together.
///
/// `leave` and `has_left` are thread-safe; one thread at a time does the rest.
class Communicator {
 public:
  /// Opens the others' memory. `offers` has one for each rank. Throws ShmError.
  Communicator(std::shared_ptr<Arena> arena, int rank, const std::vector<Offer>& offers);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  Arena& arena() const { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }
  Mailbox& mailbox(int rank) const { return *mailboxes_[rank]; }

  /// `bytes` of a rank's memory. Throws ShmError.
  std::byte* resolve(int rank, const Place& place, std::size_t bytes);

  /// Makes this rank's next step: what it wrote before is seen by those who wait for the step.
  void step();

  /// Waits until all ranks have made as many steps as this one, at most until `pause`: false then.
  /// Throws ShmError where a rank that is waited for has ended or left, or has not come by
  /// `deadline`, which is `timeout` after the beginning, or this rank has left.
  bool wait_for_all(Clock::time_point pause, Clock::time_point deadline, Patience patience,
                    std::chrono::milliseconds timeout);

  /// Leaves the group for good: this rank's waits end, and the others' for it. A step to which not
  /// all have come is over for those who come later, too. Not in a process
  /// that the rank forked, nor alone in a group, where nobody waits.
  void leave();
  bool has_left() const;

 private:
  bool has_come(int rank) const {
    return static_cast<std::int32_t>(mailboxes_[rank]->progress.load(std::memory_order_acquire) -
                                     steps_) >= 0;
  }
  bool all_have_come() const;
  void check_others(bool with_processes) const;
  [[noreturn]] void fail_left(int rank) const;
  [[noreturn]] void fail_late(std::chrono::milliseconds timeout) const;
  bool sleep(int rank, Clock::duration limit);

  const std::shared_ptr<Arena> arena_;
  const int rank_;
  const pid_t owner_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null for this rank
  std::vector<Mailbox*> mailboxes_;
  std::uint32_t steps_ = 0;
  /// Turns of a loop before a wait sleeps; next to none where the ranks share processors.
  int turns_[2];
};

}  // namespace ddp::shm
