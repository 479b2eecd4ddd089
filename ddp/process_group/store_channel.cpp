#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/store_channel.h>

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Kind = StoreFailure::Kind;

/// How much longer than a store's own timeout its answer may take.
constexpr milliseconds kSlack(2000);

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string text(const std::vector<std::uint8_t>& value) { return {value.begin(), value.end()}; }

std::string member_key(int rank) { return fmt::format("ddp/member/{}", rank); }
std::string connected_key(int rank) { return fmt::format("ddp/connected/{}", rank); }
std::string refused_key(int rank) { return fmt::format("ddp/refused/{}", rank); }
std::string goodbye_key(int rank) { return fmt::format("ddp/goodbye/{}", rank); }
std::string read_key(int rank) { return fmt::format("ddp/read/{}", rank); }
std::string failure_key(int rank) { return fmt::format("ddp/failure/{}", rank); }

milliseconds left_until(Clock::time_point deadline) {
  return std::max(milliseconds(1),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "));
}

}  // namespace

StoreChannel::StoreChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                           milliseconds timeout)
    : connection_(store),
      group_(c10::intrusive_ptr<c10d::ProcessGroup>()),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout) {}

void StoreChannel::set(const std::string& key, const std::string& value, milliseconds limit) {
  connection_.call(limit, [=](c10d::Store& store) {
    store.set(key, bytes(value));
    // `set` is not acknowledged; after this answer the store has the value even if this process
    // ends.
    store.check({key});
    return std::string();
  });
}

std::string StoreChannel::await(const std::string& key, milliseconds patience) {
  return connection_.call(patience + kSlack, [=](c10d::Store& store) {
    store.wait({key}, patience);
    return text(store.get(key));
  });
}

bool StoreChannel::comes(const std::string& key, milliseconds patience) {
  try {
    await(key, patience);
    return true;
  } catch (const StoreFailure& failure) {
    if (failure.kind() == Kind::kTimeout) {
      return false;
    }
    throw;
  }
}

void StoreChannel::announce(const std::string& text) { set(member_key(rank_), text, timeout_); }

std::vector<std::string> StoreChannel::announcements() {
  std::vector<std::string> texts;
  for (int rank = 0; rank < world_size_; ++rank) {
    try {
      texts.push_back(await(member_key(rank), timeout_));
    } catch (const StoreFailure& failure) {
      throw CommunicationError(fmt::format("rank {}: cannot learn what rank {} has announced: {}",
                                           rank_, rank, failure.what()));
    }
  }
  return texts;
}

std::vector<std::string> StoreChannel::exchange(const std::string& name, const std::string& text,
                                                const std::string& what) {
  const auto key = [&](int rank) { return fmt::format("ddp/exchange/{}/{}", name, rank); };
  const auto deadline = Clock::now() + timeout_;
  std::vector<std::string> texts;
  int awaited = rank_;
  try {
    // Not every store keeps an empty value.
    set(key(rank_), "=" + text, left_until(deadline));
    for (awaited = 0; awaited < world_size_; ++awaited) {
      texts.push_back(await(key(awaited), left_until(deadline)).substr(1));
    }
  } catch (const StoreFailure& failure) {
    if (failure.kind() == Kind::kTimeout) {
      throw CommunicationError(fmt::format("rank {}: rank {} has not {} within {:.1f} s", rank_,
                                           awaited, what,
                                           std::chrono::duration<double>(timeout_).count()));
    }
    throw CommunicationError(fmt::format("rank {}: cannot learn whether rank {} has {}: {}", rank_,
                                         awaited, what, failure.what()));
  }
  return texts;
}

void StoreChannel::find_members() {
  assume_all_members();
  const auto missing = not_announced();
  members_.erase(std::remove_if(members_.begin(), members_.end(),
                                [&](int rank) {
                                  return std::binary_search(missing.begin(), missing.end(), rank);
                                }),
                 members_.end());
}

void StoreChannel::assume_all_members() {
  members_.resize(world_size_);
  std::iota(members_.begin(), members_.end(), 0);
}

std::vector<int> StoreChannel::not_announced() {
  auto missing = std::make_shared<std::vector<int>>();
  try {
    connection_.call(std::min<milliseconds>(timeout_, std::chrono::seconds(5)) + kSlack,
                     [missing, world_size = world_size_](c10d::Store& store) {
                       std::vector<std::string> keys;
                       for (int rank = 0; rank < world_size; ++rank) {
                         keys.push_back(member_key(rank));
                       }
                       if (!store.check(keys)) {
                         for (int rank = 0; rank < world_size; ++rank) {
                           if (!store.check({keys[rank]})) {
                             missing->push_back(rank);
                           }
                         }
                       }
                       return std::string();
                     });
    return *missing;
  } catch (const StoreFailure&) {
    return {};
  }
}

void StoreChannel::set_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  group_ = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
}

void StoreChannel::await_connected(Clock::time_point deadline) {
  // How soon a rank that is killed meanwhile is missed.
  constexpr milliseconds kGlance(500);
  int awaited = rank_;
  try {
    set(connected_key(rank_), "1", left_until(deadline) + kSlack);
    for (const int other : others()) {
      awaited = other;
      for (;;) {
        // A rank without announcements may leave when it likes. Asked before the key is: what a
        // rank said before it left is there then.
        const auto group = all_are_members() ? group_.lock() : nullptr;
        const bool one_left = group && peers_gone(*group) > 0;
        if (comes(connected_key(other), std::min(kGlance, left_until(deadline)))) {
          break;
        }
        if (comes(refused_key(other), milliseconds(1))) {
          const auto reason = await(refused_key(other), kSlack);
          refuse(reason);
          throw CommunicationError(
              fmt::format("rank {}: the group was not made: {}", rank_, reason));
        }
        if (one_left) {
          throw CommunicationError(fmt::format(
              "rank {}: a rank left before all were connected: rank {} has not said that it is; "
              "look into the ranks' logs for the one that ended first",
              rank_, other));
        }
        if (Clock::now() >= deadline) {
          throw StoreFailure(Kind::kTimeout, "");
        }
      }
    }
  } catch (const StoreFailure& failure) {
    if (failure.kind() == Kind::kTimeout) {
      throw CommunicationError(
          fmt::format("rank {}: rank {} has not connected to all others within {:.1f} s; its log "
                      "says to which it could not",
                      rank_, awaited, std::chrono::duration<double>(timeout_).count()));
    }
    throw CommunicationError(fmt::format("rank {}: cannot learn whether rank {} is connected: {}",
                                         rank_, awaited, failure.what()));
  }
}

void StoreChannel::refuse(const std::string& reason) {
  const auto deadline = Clock::now() + std::min(timeout_, milliseconds(5000));
  try {
    set(refused_key(rank_), reason, left_until(deadline));
    for (const int other : others()) {
      await(refused_key(other), left_until(deadline));
    }
  } catch (const StoreFailure&) {
    // The reason is what this rank has to say.
  }
}

std::vector<int> StoreChannel::others() const {
  auto ranks = members_;
  ranks.erase(std::remove(ranks.begin(), ranks.end(), rank_), ranks.end());
  return ranks;
}

std::string StoreChannel::decide(
    const std::string& name, const std::string& contribution,
    const std::function<std::string(const std::vector<std::string>&)>& judge,
    const std::string& what) {
  if (members_.size() < 2) {
    return judge({contribution});
  }
  // The verdict's first letter says whether the leader has heard of all: "v", or "m" and the rank
  // that it has not heard of.
  const auto key = [&](int rank) { return fmt::format("ddp/decide/{}/{}", name, rank); };
  const auto verdict_key = fmt::format("ddp/decide/{}/verdict", name);
  const auto deadline = Clock::now() + timeout_;
  const int leader = members_.front();
  const auto fail = [&](int rank, const StoreFailure& failure) {
    if (failure.kind() == Kind::kTimeout) {
      throw CommunicationError(fmt::format("rank {}: rank {} has not {} within {:.1f} s", rank_,
                                           rank, what,
                                           std::chrono::duration<double>(timeout_).count()));
    }
    throw CommunicationError(fmt::format("rank {}: cannot learn whether rank {} has {}: {}", rank_,
                                         rank, what, failure.what()));
  };
  const auto publish = [&](const std::string& verdict, milliseconds patience) {
    set(verdict_key, verdict, left_until(deadline) + kSlack);
    // The verdict may end this process, and the store with it: the others read it first.
    const auto read_by = Clock::now() + patience;
    for (const int other : others()) {
      try {
        await(key(other) + "/read", left_until(read_by));
      } catch (const StoreFailure&) {
        break;
      }
    }
  };
  int waited_for = leader;
  try {
    if (rank_ != leader) {
      set(key(rank_), contribution, left_until(deadline) + kSlack);
      // The leader may have come later than this rank, and waits as long.
      const auto verdict = await(verdict_key, left_until(deadline) + kSlack);
      set(key(rank_) + "/read", "1", kSlack);
      if (verdict.front() == 'm') {
        fail(std::stoi(verdict.substr(1)), StoreFailure(Kind::kTimeout, ""));
      }
      return verdict.substr(1);
    }
    std::vector<std::string> contributions;
    for (const int rank : members_) {
      waited_for = rank;
      contributions.push_back(rank == rank_ ? contribution
                                            : await(key(rank), left_until(deadline)));
    }
    const auto verdict = judge(contributions);
    publish("v" + verdict, milliseconds(5000));
    return verdict;
  } catch (const StoreFailure& failure) {
    if (rank_ == leader && failure.kind() == Kind::kTimeout) {
      try {
        publish(fmt::format("m{}", waited_for), 2 * kSlack);
      } catch (const StoreFailure&) {
        // The others then say that this rank has not come.
      }
    }
    fail(waited_for, failure);
  }
  return {};
}

void StoreChannel::say_goodbye() {
  try {
    set(goodbye_key(rank_), "1", kSlack);
  } catch (const StoreFailure&) {
    // Nobody is left to be told.
  }
}

std::vector<int> StoreChannel::await_goodbyes(milliseconds patience) {
  struct Missing {
    std::mutex mutex;
    std::vector<int> ranks;
  };
  const auto missing = std::make_shared<Missing>();
  missing->ranks = others();
  try {
    connection_.call(patience + kSlack, [missing, patience, ranks = others()](c10d::Store& store) {
      // A rank that failed ends without a good-bye unless its program catches the error; it may
      // still read what the others say.
      constexpr milliseconds kPatienceAfterFailure(3000);
      const auto deadline = Clock::now() + patience;
      for (const int rank : ranks) {
        std::optional<Clock::time_point> failed_at;
        bool gone = false;
        while (!(gone = store.check({goodbye_key(rank)})) && Clock::now() < deadline) {
          if (!failed_at && store.check({failure_key(rank)})) {
            failed_at = Clock::now();
          }
          if (failed_at && Clock::now() > *failed_at + kPatienceAfterFailure) {
            gone = true;
            break;
          }
          std::this_thread::sleep_for(milliseconds(20));
        }
        if (gone) {
          const std::lock_guard lock(missing->mutex);
          std::erase(missing->ranks, rank);
        }
      }
      return std::string();
    });
  } catch (const StoreFailure&) {
    // What is known by now.
  }
  const std::lock_guard lock(missing->mutex);
  return missing->ranks;
}

void StoreChannel::watch_on_device(const std::string& name, c10d::Work& work) {
  on_device_.add(name, work);
}

std::string StoreChannel::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
      return failure_;
    }
  }
  const auto found = on_device_.failure();
  return found ? fmt::format("rank {} of {}: {}", rank_, world_size_, *found) : "";
}

bool StoreChannel::all_failed(const std::string& scope, std::uint64_t pass,
                              const std::string& report, milliseconds patience) {
  if (!all_are_members()) {
    return false;
  }
  if (world_size_ == 1) {
    return true;
  }
  const auto key = fmt::format("ddp/failed_pass/{}/{}", scope, pass);
  try {
    connection_.call(patience + kSlack,
                     [=, rank = rank_, world_size = world_size_](c10d::Store& store) {
                       store.set(fmt::format("{}/{}", key, rank), bytes(report));
                       if (store.add(key + "/count", 1) == world_size) {
                         store.set(key + "/all", bytes("1"));
                       } else {
                         store.wait({key + "/all"}, patience);
                       }
                       return std::string();
                     });
    return true;
  } catch (const StoreFailure&) {
    return false;
  }
}

void StoreChannel::abort(const std::string& report) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
      return;
    }
    failure_ = report;
  }
  try {
    set(failure_key(rank_), report, kSlack);
  } catch (const StoreFailure&) {
    // The others then only know that this rank left.
  }
  end_operations();
}

void StoreChannel::await_readers(milliseconds patience) {
  if (serves_store_) {
    reports_of_others(patience);
  }
}

void StoreChannel::end_operations() {
  if (const auto group = group_.lock()) {
    try {
      group->abort();
    } catch (const std::exception&) {
      // A backend that cannot be aborted ends with the process.
    }
  }
}

bool StoreChannel::peer_lost() {
  const auto group = group_.lock();
  const int closed = group ? peers_gone(*group) : 0;
  if (closed == 0) {
    return false;
  }
  try {
    const auto goodbyes = connection_.call(kSlack, [ranks = others()](c10d::Store& store) {
      return std::to_string(std::count_if(
          ranks.begin(), ranks.end(), [&](int rank) { return store.check({goodbye_key(rank)}); }));
    });
    return closed > std::stoi(goodbyes);
  } catch (const StoreFailure&) {
    return true;
  }
}

/// Among ranks that failed together, the one that serves the store would else end first, and the
/// others learn of nothing but that.
void StoreChannel::let_others_read(const std::vector<int>& heard) {
  const auto deadline = Clock::now() + kSlack;
  try {
    if (!serves_store_) {
      set(read_key(rank_), "1", kSlack);
      return;
    }
    if (heard.empty()) {
      return;
    }
    std::vector<std::string> keys;
    for (const int other : heard) {
      keys.push_back(read_key(other));
    }
    const auto patience = left_until(deadline);
    connection_.call(patience + kSlack, [keys, patience](c10d::Store& store) {
      store.wait(keys, patience);
      return std::string();
    });
  } catch (const StoreFailure&) {
    // A rank that left by an error of its own does not read.
  }
}

std::string StoreChannel::reports_of_others(milliseconds patience) {
  struct Heard {
    std::mutex mutex;
    std::map<int, std::string> reports;
    std::vector<int> finished;
    std::vector<int> nothing;
  };
  const auto heard = std::make_shared<Heard>();
  heard->nothing = others();
  std::string unheard_because;
  try {
    connection_.call(patience + kSlack, [heard, patience](c10d::Store& store) {
      const auto deadline = Clock::now() + patience;
      for (;;) {
        std::vector<int> asked;
        {
          const std::lock_guard lock(heard->mutex);
          asked = heard->nothing;
        }
        for (const int rank : asked) {
          // In this order: a rank that failed says good-bye, too, later.
          const bool left = store.check({failure_key(rank)});
          const bool finished = !left && store.check({goodbye_key(rank)});
          if (!left && !finished) {
            continue;
          }
          const auto report = left ? text(store.get(failure_key(rank))) : std::string();
          const std::lock_guard lock(heard->mutex);
          std::erase(heard->nothing, rank);
          if (left) {
            heard->reports.emplace(rank, report);
          } else {
            heard->finished.push_back(rank);
          }
        }
        if (Clock::now() > deadline) {
          return std::string();
        }
        {
          const std::lock_guard lock(heard->mutex);
          if (heard->nothing.empty()) {
            return std::string();
          }
        }
        std::this_thread::sleep_for(milliseconds(10));
      }
    });
  } catch (const StoreFailure& failure) {
    unheard_because = failure.what();
  }
  std::unique_lock lock(heard->mutex);
  const auto reports = heard->reports;
  const auto finished = heard->finished;
  const auto nothing = heard->nothing;
  lock.unlock();
  std::string words;
  std::vector<int> failed;
  for (const auto& [rank, report] : reports) {
    words += fmt::format("\n  rank {} left: {}", rank, report);
    failed.push_back(rank);
  }
  if (unheard_because.empty()) {
    let_others_read(failed);
  }
  if (!finished.empty()) {
    words += fmt::format(
        "\n  {} finished and called ddp::destroy_process_group(): every rank must take part in "
        "each "
        "collective and each step",
        ranks_text(finished));
  }
  if (!unheard_because.empty()) {
    words +=
        fmt::format("\n  {} (rank 0, unless the program gave a store of its own)", unheard_because);
  }
  // Where the store's own rank has said nothing, the others could not either.
  const bool store_ended_first = !unheard_because.empty() && nothing.size() == others().size();
  if (!nothing.empty() && !store_ended_first) {
    words += fmt::format(
        "\n  no word from {}: killed, stopped, or ended without ddp::destroy_process_group()",
        ranks_text(nothing));
  }
  return words;
}

}  // namespace ddp::detail
