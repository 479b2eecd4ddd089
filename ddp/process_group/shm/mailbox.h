#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <ddp/process_group/shm/data_type.h>

// What the ranks' processes share besides the tensors' own memory. Everything here is read by other
// processes: fixed layout, no pointers.

namespace ddp::shm {

/// The kinds of collectives.
enum class Kind : std::uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kBarrier,
};

/// A place in a rank's memory: the number of a segment, which of those that had the number, and the
/// offset in it.
struct Place {
  std::uint64_t serial = 0;  // 0: not in shared memory
  std::uint64_t offset = 0;
  std::uint32_t segment = 0;
};

/// A rank's call of a collective, as the others see it.
struct Announcement {
  Kind kind = Kind::kBarrier;
  DataType type = DataType::kOther;
  Op op = Op::kSum;
  /// Whether the first chunk lies in the staging memory already.
  bool is_staged = false;
  std::int32_t root = 0;
  /// Elements that each rank gives (of a reduce-scatter: gets).
  std::uint64_t count = 0;
  /// Where the others find this rank's tensor, and its staging memory.
  Place data;
  Place staging;
};

/// One of a rank's segments, for the others to open. The serial number tells segments apart that
/// had the same entry.
struct SegmentEntry {
  std::atomic<std::uint64_t> serial;
  std::uint64_t bytes;
  std::int32_t fd;
};

/// Each takes a file descriptor, of which a process often has 1024.
constexpr int kSegments = 256;
/// A message of at most so many bytes lies in the mailbox itself: one step, and no other memory.
constexpr std::size_t kInlineBytes = std::size_t{16} << 10;
constexpr std::size_t kCacheLine = 64;
constexpr std::uint64_t kMagic = 0x64647073686d3031;  // "ddpshm01"

/// At the beginning of every segment: whose it is.
struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t cookie;
  std::uint64_t serial;
};

/// Whether a rank is in the group. One that gives up has not seen all others make its last step,
/// and that step's collective is over for who comes to it later, too.
enum Leave : std::uint32_t { kStays = 0, kLeft = 1, kGaveUp = 2 };

/// What one rank writes and the others read.
///
/// `progress` counts the steps of collectives that the rank has made. In every collective all ranks
/// make the same number of steps, so a rank that waits for the others waits until their counters
/// have reached its own. It is also the futex on which they sleep.
///
/// Of announcements and messages there are two, used in turn: a rank that makes its call number n +
/// 2 has seen all others begin n + 1, so that they have read those of n.
struct Mailbox {
  SegmentHeader header;
  alignas(kCacheLine) std::atomic<std::uint32_t> progress;
  std::atomic<std::uint32_t> sleepers;
  /// A `Leave`: the rank has left the group and makes no more steps.
  std::atomic<std::uint32_t> has_left;
  alignas(kCacheLine) Announcement announcements[2];
  alignas(kCacheLine) std::byte messages[2][kInlineBytes];
  alignas(kCacheLine) SegmentEntry segments[kSegments];
};

// Atomics that are not would lie in another process's locks.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

}  // namespace ddp::shm
