#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/store_channel.h>

namespace ddp {

/// Options of `DistributedDataParallel`'s `join`, with Python's names and defaults; the same on
/// every rank.
class JoinOptions {
 public:
  /// True: gradients are sums over the active ranks divided by the group's size, so that a rank
  /// without input counts as zeros. False: divided by the number of ranks that are still active.
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
  /// False: `join` only runs its body.
  TORCH_ARG(bool, enable) = true;
  /// True: as soon as one rank has no input any more, `join` throws UsageError on every rank.
  TORCH_ARG(bool, throw_on_early_termination) = false;
};

namespace detail {

// Note [Uneven inputs]
// ~~~~~~~~~~~~~~~~~~~~
// An active rank announces what it is about to communicate, in one small all-reduce to which every
// rank contributes its own word at its own place; a rank whose body has returned answers each
// announcement with the same collectives, zeros in them, until nobody is active. Only what
// communicates is announced: a pass that is reduced, and a forward that broadcasts buffers or
// agrees on the buckets' layout. So accumulation under no_sync(), several forwards before one
// backward and several backwards need no rule of their own. (Python announces every forward and
// then guesses, from flags sent along, what the backward will do.)

/// What a rank says in an announcement.
enum class JoinWord : std::int32_t {
  kJoined = 0,     // its body has returned
  kForward = 1,    // the buckets' layout, where it is due
  kBuffers = 2,    // the same, then the buffers
  kBackward = 3,   // a pass
  kExhausted = 4,  // its body has returned, which shall be an error
};

/// The announcements of one `join`. Not thread-safe; see Note [Uneven inputs].
class JoinSession {
 public:
  JoinSession(ProcessGroup group, std::shared_ptr<StoreChannel> channel, JoinOptions options,
              c10::Device device);

  const JoinOptions& options() const { return options_; }

  /// An active rank's: says what comes next. Returns the number of active ranks. Throws UsageError
  /// on all ranks where active ranks say different things or one must not have finished,
  /// CommunicationError where the group fails.
  int announce(JoinWord word);

  /// A rank's whose body has returned: what the active ranks do next; empty where there are none.
  /// Throws as `announce`.
  std::optional<JoinWord> listen();

  /// The highest of the ranks that were active last.
  int last_active() const { return last_active_; }
  /// Whether all ranks know of the failure that this session threw.
  bool ended_everywhere() const { return ended_everywhere_; }

 private:
  std::vector<std::int32_t> exchange(JoinWord word);
  void check(const std::vector<std::int32_t>& words);

  ProcessGroup group_;
  std::shared_ptr<StoreChannel> channel_;
  JoinOptions options_;
  c10::Device device_;
  int last_active_;
  bool ended_everywhere_ = false;
};

}  // namespace detail
}  // namespace ddp
