#include <ddp/process_group/store_channel.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/error_text.h>

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string member_key(int rank) { return fmt::format("ddp/member/{}", rank); }
std::string goodbye_key(int rank) { return fmt::format("ddp/goodbye/{}", rank); }
std::string failure_key(int rank) { return fmt::format("ddp/failure/{}", rank); }

milliseconds left_until(Clock::time_point deadline) {
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

/// Runs `work` on a thread of its own and waits at most `limit` for it: a store whose process is
/// stopped answers neither yes nor no, and some of its calls have no timeout. A thread that is still
/// blocked then ends with the connection; `work` therefore owns everything that it uses.
template <class Result>
Result within(milliseconds limit, Result otherwise, std::function<Result()> work) {
  auto task = std::make_shared<std::packaged_task<Result()>>(std::move(work));
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(limit) != std::future_status::ready) {
    return otherwise;
  }
  try {
    return result.get();
  } catch (const std::exception&) {
    return otherwise;
  }
}

constexpr milliseconds kSlack(1000);

}  // namespace

StoreChannel::StoreChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                           milliseconds timeout)
    : store_(store->clone()),
      group_(c10::intrusive_ptr<c10d::ProcessGroup>()),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout) {
  store_->setTimeout(timeout);
}

void StoreChannel::announce() { store_->set(member_key(rank_), bytes("1")); }

void StoreChannel::find_members() {
  members_.clear();
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size_; ++rank) {
    keys.push_back(member_key(rank));
  }
  if (store_->check(keys)) {
    assume_all_members();
    return;
  }
  for (int rank = 0; rank < world_size_; ++rank) {
    if (store_->check({keys[rank]})) {
      members_.push_back(rank);
    }
  }
}

void StoreChannel::assume_all_members() {
  members_.resize(world_size_);
  std::iota(members_.begin(), members_.end(), 0);
}

void StoreChannel::set_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  group_ = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
}

std::string StoreChannel::text_of(const std::string& key) {
  const auto value = store_->get(key);
  return {value.begin(), value.end()};
}

std::string StoreChannel::decide(
    const std::string& name, const std::string& contribution,
    const std::function<std::string(const std::vector<std::string>&)>& judge, const std::string& what) {
  if (members_.size() < 2) {
    return judge({contribution});
  }
  const auto key = [&](int rank) { return fmt::format("ddp/decide/{}/{}", name, rank); };
  const auto verdict_key = fmt::format("ddp/decide/{}/verdict", name);
  const auto deadline = Clock::now() + timeout_;
  const int leader = members_.front();
  if (rank_ != leader) {
    store_->set(key(rank_), bytes(contribution));
    try {
      store_->wait({verdict_key}, timeout_);
      return text_of(verdict_key);
    } catch (const std::exception& error) {
      throw CommunicationError(
          fmt::format("rank {}: no word from rank {} within {:.1f} s: it has not {}, or has ended. ({})", rank_,
                      leader, std::chrono::duration<double>(timeout_).count(), what, concise(error)));
    }
  }
  std::vector<std::string> contributions;
  for (const int rank : members_) {
    if (rank == rank_) {
      contributions.push_back(contribution);
      continue;
    }
    try {
      store_->wait({key(rank)}, left_until(deadline));
      contributions.push_back(text_of(key(rank)));
    } catch (const std::exception& error) {
      throw CommunicationError(
          fmt::format("rank {}: rank {} has not {} within {:.1f} s, or has ended. ({})", rank_, rank, what,
                      std::chrono::duration<double>(timeout_).count(), concise(error)));
    }
  }
  const auto verdict = judge(contributions);
  store_->set(verdict_key, bytes(verdict));
  return verdict;
}

std::vector<int> StoreChannel::say_goodbye(bool wait_for_others, milliseconds patience) {
  auto others = members_;
  others.erase(std::remove(others.begin(), others.end(), rank_), others.end());
  const auto store = store_;
  const auto rank = rank_;
  if (!wait_for_others) {
    // `set` is not acknowledged; the check makes sure that the store has it before the connection
    // goes.
    within<bool>(milliseconds(2000), false, [store, rank] {
      store->set(goodbye_key(rank), bytes("1"));
      return store->check({goodbye_key(rank)});
    });
    return {};
  }
  return within<std::vector<int>>(patience + kSlack, others, [store, rank, others, patience] {
    store->set(goodbye_key(rank), bytes("1"));
    const auto deadline = Clock::now() + patience;
    std::vector<int> missing;
    for (const int other : others) {
      try {
        store->wait({goodbye_key(other)}, left_until(deadline));
      } catch (const std::exception&) {
        missing.push_back(other);
      }
    }
    return missing;
  });
}

bool StoreChannel::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

bool StoreChannel::all_failed(const std::string& scope, std::uint64_t pass, const std::string& report,
                              milliseconds patience) {
  if (!all_are_members()) {
    return false;
  }
  if (world_size_ == 1) {
    return true;
  }
  const auto store = store_;
  const auto rank = rank_;
  const auto world_size = world_size_;
  const auto key = fmt::format("ddp/failed_pass/{}/{}", scope, pass);
  return within<bool>(patience + kSlack, false, [=] {
    store->set(fmt::format("{}/{}", key, rank), bytes(report));
    if (store->add(key + "/count", 1) == world_size) {
      store->set(key + "/all", bytes("1"));
      return true;
    }
    store->wait({key + "/all"}, patience);
    return true;
  });
}

void StoreChannel::abort(const std::string& report) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      return;
    }
    failed_ = true;
  }
  const auto store = store_;
  const auto rank = rank_;
  within<bool>(kSlack, false, [=] {
    store->set(failure_key(rank), bytes(report));
    return store->check({failure_key(rank)});
  });
  if (const auto group = group_.lock()) {
    try {
      group->abort();
    } catch (const std::exception&) {
      // A backend that cannot be aborted ends with the process.
    }
  }
}

std::string StoreChannel::reports_of_others(milliseconds patience) {
  auto others = members_;
  others.erase(std::remove(others.begin(), others.end(), rank_), others.end());
  if (others.empty()) {
    return {};
  }
  const auto store = store_;
  const std::string gone = "\n  the rank that serves the store does not answer: stopped, or cut off";
  return within<std::string>(patience + kSlack, gone, [=]() -> std::string {
    const auto deadline = Clock::now() + patience;
    std::string text;
    std::vector<int> silent;
    for (const int other : others) {
      try {
        store->wait({failure_key(other)}, left_until(deadline));
        const auto value = store->get(failure_key(other));
        text += fmt::format("\n  rank {} left: {}", other, std::string(value.begin(), value.end()));
      } catch (const c10::DistNetworkError&) {
        return text + "\n  the store's connection is closed: the rank that serves it (rank 0 unless the "
                      "program gave a store of its own) has ended";
      } catch (const std::exception&) {
        silent.push_back(other);
      }
    }
    if (!silent.empty()) {
      text += fmt::format("\n  no word from rank{} {}: killed, stopped, or ended without "
                          "ddp::destroy_process_group()",
                          silent.size() > 1 ? "s" : "", fmt::join(silent, ", "));
    }
    return text;
  });
}

}  // namespace ddp::detail
