#include <new>
#include <string>
#include <sys/random.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <ddp/process_group/shm/arena.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {
namespace {

/// Before the memory that is handed out, in every segment.
constexpr std::size_t kHeaderBytes = kCacheLine;

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    throw ShmError("the system gives no random numbers (getrandom)");
  }
  return number;
}

}  // namespace

Arena::Arena()
    : owner_(getpid()),
      mailbox_segment_(Segment::create(sizeof(Mailbox))),
      mailbox_(new (mailbox_segment_.data()) Mailbox{}) {
  mailbox_->header = {kMagic, random_number(), 0};
}

std::byte* Arena::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::uint32_t number = 0;
  while (number < kSegments && mailbox_->segments[number].serial.load() != 0) {
    ++number;
  }
  if (number == kSegments) {
    throw ShmError(fmt::format(
        "a rank has {} pieces of shared memory, which is all that it can have", kSegments));
  }
  Allocation made{Segment::create(kHeaderBytes + bytes), number};
  new (made.segment.data()) SegmentHeader{kMagic, cookie(), ++last_serial_};
  auto& entry = mailbox_->segments[number];
  entry.bytes = made.segment.bytes();
  entry.fd = made.segment.fd();
  entry.serial.store(last_serial_);
  auto* const begin = made.segment.data();
  allocations_.emplace(begin, std::move(made));
  return begin + kHeaderBytes;
}

Segment Arena::remove(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(static_cast<const std::byte*>(data) - kHeaderBytes);
  if (found == allocations_.end()) {
    return {};
  }
  if (getpid() == owner_) {
    mailbox_->segments[found->second.number].serial.store(0);
  }
  auto segment = std::move(found->second.segment);
  allocations_.erase(found);
  return segment;
}

void Arena::release(const void* data) {
  auto segment = remove(data);
  if (getpid() == owner_) {
    segment.discard();
  }
}

void Arena::leave_to_others(const void* data) { remove(data); }

Place Arena::find(const void* data, std::size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  auto found = allocations_.upper_bound(begin);
  if (found == allocations_.begin()) {
    return {};
  }
  --found;
  const auto& [start, allocation] = *found;
  const auto offset = static_cast<std::size_t>(begin - start);
  if (offset + bytes > allocation.segment.bytes()) {
    return {};
  }
  return {mailbox_->segments[allocation.number].serial.load(), offset, allocation.number};
}

}  // namespace ddp::shm
