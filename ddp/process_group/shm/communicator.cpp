#include <algorithm>
#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/process_group/shm/communicator.h>
#include <ddp/process_group/shm/futex.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {
namespace {

/// A sleeper looks after so long whether the others still live.
constexpr std::chrono::milliseconds kLook(50);

}  // namespace

Communicator::Communicator(std::shared_ptr<Arena> arena, int rank, const std::vector<Offer>& offers)
    : arena_(std::move(arena)), rank_(rank), owner_(getpid()) {
  for (int other = 0; other < static_cast<int>(offers.size()); ++other) {
    if (other == rank) {
      peers_.push_back(nullptr);
      mailboxes_.push_back(&arena_->mailbox());
      continue;
    }
    const auto& offer = offers[other];
    try {
      peers_.push_back(std::make_unique<Peer>(offer.pid, offer.mailbox_fd, offer.cookie));
    } catch (const ShmError& error) {
      throw ShmError(fmt::format("the group's rank {}: {}", other, error.what()));
    }
    mailboxes_.push_back(&peers_.back()->mailbox());
  }
  const int processors = count_processors(offers);
  turns_[static_cast<int>(Patience::kShort)] = processors >= 2 * size() ? 2000 : 20;
  turns_[static_cast<int>(Patience::kLong)] = processors >= size() ? 4000 : 20;
}

std::byte* Communicator::resolve(int rank, const Place& place, std::size_t bytes) {
  try {
    return peers_[rank]->resolve(place, bytes);
  } catch (const ShmError& error) {
    throw ShmError(fmt::format("rank {}: {}", rank, error.what()));
  }
}

void Communicator::step() {
  auto& own = *mailboxes_[rank_];
  // Either this sees the sleeper, or the sleeper sees the step.
  own.progress.store(++steps_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake(own.progress);
  }
}

bool Communicator::wait_for_all(Clock::time_point pause, Clock::time_point deadline,
                                Patience patience, std::chrono::milliseconds timeout) {
  for (int rank = 0; rank < size(); ++rank) {
    for (int turn = turns_[static_cast<int>(patience)]; turn > 0 && !has_come(rank); --turn) {
      relax();
    }
    // Most waits are short: the others' processes are looked at after a while only.
    bool has_slept_through = false;
    while (!has_come(rank)) {
      const auto now = Clock::now();
      check_others(has_slept_through || now >= deadline);
      if (now >= deadline) {
        fail_late(timeout);
      }
      if (now >= pause) {
        return false;
      }
      has_slept_through =
          !sleep(rank, std::min<Clock::duration>({kLook, pause - now, deadline - now}));
    }
  }
  for (int rank = 0; rank < size(); ++rank) {
    const auto& mailbox = *mailboxes_[rank];
    if (mailbox.has_left.load() == kGaveUp && mailbox.progress.load() == steps_) {
      fail_left(rank);
    }
  }
  return true;
}

bool Communicator::sleep(int rank, Clock::duration limit) {
  auto& mailbox = *mailboxes_[rank];
  bool was_woken = true;
  mailbox.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const auto seen = mailbox.progress.load(std::memory_order_seq_cst);
  if (static_cast<std::int32_t>(seen - steps_) < 0 && mailbox.has_left.load() == kStays) {
    was_woken = futex_wait(mailbox.progress, seen, limit);
  }
  mailbox.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return was_woken;
}

bool Communicator::all_have_come() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (!has_come(rank)) {
      return false;
    }
  }
  return true;
}

void Communicator::check_others(bool with_processes) const {
  if (has_left()) {
    fail_left(rank_);
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) {
      continue;
    }
    const bool left = mailboxes_[rank]->has_left.load() != kStays;
    const bool ended = !left && with_processes && peers_[rank]->has_ended();
    // Asked in this order: a rank may have made this step as its last. Then it has seen all others
    // make it.
    if ((left || ended) && !all_have_come()) {
      if (left) {
        fail_left(rank);
      }
      throw ShmError(fmt::format("rank {} has ended (process {})", rank, peers_[rank]->pid()));
    }
  }
}

void Communicator::fail_left(int rank) const {
  if (rank == rank_) {
    throw ShmError("this rank has left the group");
  }
  throw ShmError(fmt::format("rank {} has left the group", rank));
}

void Communicator::fail_late(std::chrono::milliseconds timeout) const {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank) {
    if (!has_come(rank)) {
      late.push_back(rank);
    }
  }
  const bool several = late.size() > 1;
  throw ShmError(fmt::format("it timed out after {:.1f} s: {} {} {} not come to it",
                             std::chrono::duration<double>(timeout).count(),
                             several ? "ranks" : "rank", fmt::join(late, ", "),
                             several ? "have" : "has"));
}

void Communicator::leave() {
  if (getpid() != owner_ || size() == 1) {
    return;
  }
  auto& own = *mailboxes_[rank_];
  const auto steps = own.progress.load();
  const bool is_complete = std::all_of(mailboxes_.begin(), mailboxes_.end(), [&](auto* mailbox) {
    return static_cast<std::int32_t>(mailbox->progress.load() - steps) >= 0;
  });
  std::uint32_t before = kStays;
  own.has_left.compare_exchange_strong(before, is_complete ? kLeft : kGaveUp);
  for (auto* mailbox : mailboxes_) {
    // The others sleep on this rank's word; this rank's threads on those of the others.
    futex_wake(mailbox->progress);
  }
}

bool Communicator::has_left() const { return mailboxes_[rank_]->has_left.load() != kStays; }

}  // namespace ddp::shm
