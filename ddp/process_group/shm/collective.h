#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ddp/process_group/shm/call.h>
#include <ddp/process_group/shm/communicator.h>
#include <ddp/process_group/shm/kernels.h>

namespace ddp::shm {

/// How messages go through the ranks' mailboxes and memory. See Note [Collectives over shared
/// memory]. Carries out one call after the other, which every rank of the group begins in the same
/// order.
///
/// One thread at a time; a call that has been paused may be continued by another.
class Collectives {
 public:
  explicit Collectives(Communicator& ranks);
  ~Collectives();
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  /// Whether there is a kernel for it.
  bool can_reduce(DataType type, Op op) const { return kernels_.find(type, op) != nullptr; }

  /// Begins a call, or continues the one that was paused: until it is done, or until `pause`, and
  /// returns whether it is done. Throws ShmError where the ranks' calls do not fit together, or one
  /// is lost or late; the group is of no use then.
  bool run(const Call& call, Clock::time_point pause, Patience patience);

 private:
  /// How the message goes. The same on all ranks, for each call.
  enum class Way : std::uint8_t { kUnknown, kMailbox, kDirect, kStaged };
  struct Range {
    std::size_t begin;
    std::size_t end;
    std::size_t size() const { return end - begin; }
  };

  void begin(const Call& call);
  bool advance(const Call& call);
  bool advance_announced(const Call& call);
  bool advance_direct(const Call& call);
  bool advance_staged(const Call& call);

  const Announcement& announcement(int rank) const {
    return ranks_.mailbox(rank).announcements[calls_ % 2];
  }
  std::byte* message(int rank) const { return ranks_.mailbox(rank).messages[calls_ % 2]; }
  void check_announcements() const;

  void write_message(const Call& call);
  void finish_from_mailboxes(const Call& call);

  void make_staging();
  std::size_t chunk_elements(const Call& call) const;
  Range chunk(const Call& call, std::size_t number) const;
  std::byte* inbox(int rank, std::size_t chunk) const;
  std::byte* outbox(int rank, std::size_t chunk) const;
  void resolve_staging(const Call& call);
  void stage(const Call& call, std::size_t number);
  void work_on(const Call& call, std::size_t number);
  void take_out(const Call& call, std::size_t number);

  /// The part of `elements` that falls to a rank, cut at whole cache lines.
  Range slice(std::size_t elements, int rank, std::size_t element_bytes) const;
  void combine(const Call& call, std::size_t elements, int target_count);

  Communicator& ranks_;
  const Kernels& kernels_;
  std::uint32_t calls_ = 0;
  // Of the call that is under way.
  Clock::time_point deadline_;
  bool under_way_ = false;
  Way way_ = Way::kUnknown;
  std::size_t stage_ = 0;
  std::byte* own_staging_ = nullptr;
  Place own_staging_place_;
  std::vector<std::byte*> staging_;  // by rank, where known
  // Arguments of a kernel, kept to be used again.
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
};

}  // namespace ddp::shm
