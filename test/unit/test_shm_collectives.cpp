#include <cstring>
#include <numeric>
#include <test/support/catch2.h>
#include <thread>
#include <vector>

#include <ddp/process_group/shm/collective.h>
#include <ddp/process_group/shm/queue.h>
#include <ddp/process_group/shm/shm_error.h>

// The shared-memory collectives without c10d: ranks are threads of this process, each with an arena
// and a queue of its own.

using ddp::shm::Arena;
using ddp::shm::Call;
using ddp::shm::Clock;
using ddp::shm::Communicator;
using ddp::shm::DataType;
using ddp::shm::Kind;
using ddp::shm::Offer;
using ddp::shm::Op;
using ddp::shm::Queue;
using ddp::shm::ShmError;
using ddp::shm::Task;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kTimeout(20000);

/// One rank's end of a test.
struct Member {
  int rank;
  int size;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Queue> queue;
  std::string error;

  std::shared_ptr<Task> start(Call call) const {
    call.timeout = call.timeout.count() > 0 ? call.timeout : kTimeout;
    auto task = std::make_shared<Task>(std::vector<Call>{std::move(call)});
    queue->submit(task);
    return task;
  }
  void run(Call call) const {
    call.timeout = call.timeout.count() > 0 ? call.timeout : kTimeout;
    const auto task = std::make_shared<Task>(std::vector<Call>{std::move(call)});
    queue->submit_and_wait(task);
    check(*task);
  }
  static void check(const Task& task) {
    if (task.error()) {
      std::rethrow_exception(task.error());
    }
  }
};

std::vector<std::string> run_ranks(int size, const std::function<void(Member&)>& body) {
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<Offer> offers;
  for (int rank = 0; rank < size; ++rank) {
    arenas.push_back(std::make_shared<Arena>());
    offers.push_back(Offer::of_this_process(*arenas.back()));
  }
  std::vector<Member> members;
  for (int rank = 0; rank < size; ++rank) {
    members.push_back(
        {rank, size, arenas[rank],
         std::make_shared<Queue>(std::make_unique<Communicator>(arenas[rank], rank, offers)), ""});
  }
  std::vector<std::thread> threads;
  for (auto& member : members) {
    threads.emplace_back([&member, &body] {
      try {
        body(member);
      } catch (const std::exception& error) {
        member.error = error.what();
      }
      member.queue->leave();
    });
  }
  std::vector<std::string> errors;
  for (auto& thread : threads) {
    thread.join();
  }
  for (auto& member : members) {
    member.queue->stop();
    errors.push_back(member.error);
  }
  return errors;
}

void check_that(bool holds, const std::string& what) {
  if (!holds) {
    throw std::logic_error("wrong: " + what);
  }
}

/// Numbers in the rank's memory, in its arena or beside it.
class Numbers {
 public:
  Numbers(Member& member, std::size_t count, bool in_arena) : arena_(member.arena), count_(count) {
    if (in_arena) {
      data_ = reinterpret_cast<std::int32_t*>(arena_->allocate(count * 4 + 1));
    } else {
      own_.resize(count + 1);
      data_ = own_.data();
    }
  }
  ~Numbers() {
    if (own_.empty()) {
      arena_->release(data_);
    }
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  std::int32_t& operator[](std::size_t index) { return data_[index]; }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(data_); }
  std::byte* bytes(std::size_t index) { return reinterpret_cast<std::byte*>(data_ + index); }
  std::size_t size() const { return count_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::size_t count_;
  std::vector<std::int32_t> own_;
  std::int32_t* data_;
};

std::int32_t number(int rank, std::size_t index) {
  return static_cast<std::int32_t>(index * 7 + static_cast<std::size_t>(rank) * 1000003);
}

Call call_of(Kind kind, std::size_t count) {
  Call call;
  call.kind = kind;
  call.type = DataType::kInt32;
  call.count = count;
  return call;
}

/// Every kind of collective of `count` numbers, with tensors in the arena or not.
void run_all(Member& member, std::size_t count, bool in_arena) {
  const auto size = static_cast<std::size_t>(member.size);
  const auto sum_at = [&](std::size_t index) {
    std::int32_t sum = 0;
    for (int rank = 0; rank < member.size; ++rank) {
      sum += number(rank, index);
    }
    return sum;
  };
  const auto fill = [&](Numbers& numbers) {
    for (std::size_t index = 0; index < numbers.size(); ++index) {
      numbers[index] = number(member.rank, index);
    }
  };
  {
    Numbers numbers(member, count, in_arena);
    fill(numbers);
    auto call = call_of(Kind::kAllReduce, count);
    call.data = numbers.bytes();
    member.run(call);
    for (std::size_t index = 0; index < count; ++index) {
      check_that(numbers[index] == sum_at(index), "all_reduce");
    }
  }
  for (int root = 0; root < member.size; ++root) {
    Numbers numbers(member, count, in_arena);
    fill(numbers);
    auto call = call_of(Kind::kBroadcast, count);
    call.root = root;
    call.data = numbers.bytes();
    member.run(call);
    for (std::size_t index = 0; index < count; ++index) {
      check_that(numbers[index] == number(root, index), "broadcast");
    }
    fill(numbers);
    call.kind = Kind::kReduce;
    member.run(call);
    for (std::size_t index = 0; root == member.rank && index < count; ++index) {
      check_that(numbers[index] == sum_at(index), "reduce");
    }
  }
  {
    Numbers input(member, count, in_arena);
    Numbers output(member, count * size, in_arena);
    fill(input);
    auto call = call_of(Kind::kAllGather, count);
    call.data = input.bytes();
    for (std::size_t rank = 0; rank < size; ++rank) {
      call.pieces.push_back(output.bytes(rank * count));
    }
    member.run(call);
    for (std::size_t index = 0; index < count * size; ++index) {
      check_that(output[index] == number(static_cast<int>(index / count), index % count),
                 "all_gather");
    }
  }
  for (const bool by_pieces : {false, true}) {
    Numbers input(member, count * size, in_arena);
    Numbers output(member, count, in_arena);
    fill(input);
    auto call = call_of(Kind::kReduceScatter, count);
    call.output = output.bytes();
    for (std::size_t rank = 0; by_pieces && rank < size; ++rank) {
      call.pieces.push_back(input.bytes(rank * count));
    }
    call.data = by_pieces ? nullptr : input.bytes();
    member.run(call);
    for (std::size_t index = 0; index < count; ++index) {
      check_that(output[index] == sum_at(static_cast<std::size_t>(member.rank) * count + index),
                 "reduce_scatter");
    }
  }
  member.run(Call());
}

// Around the mailbox's size, and one, two and several chunks.
const std::size_t kCounts[] = {0,     1,     17,    4095,   4096,   4097,
                               20000, 65536, 65537, 131072, 200001, 600000};

}  // namespace

TEST_CASE("every collective, at every size, on one to five ranks, with every kind of memory") {
  for (const int size : {1, 2, 3, 5}) {
    for (const int memory : {0, 1, 2}) {  // beside the arena, in it, in it on some ranks
      for (const auto count : kCounts) {
        const auto errors = run_ranks(size, [&](Member& member) {
          run_all(member, count, memory == 1 || (memory == 2 && member.rank % 2 == 1));
        });
        INFO(count << " numbers on " << size << " ranks, memory " << memory);
        CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(size)));
      }
    }
  }
}

TEST_CASE("many calls in flight are done in order, whoever waits for which") {
  const auto errors = run_ranks(3, [](Member& member) {
    constexpr std::size_t kCount = 5000;
    std::vector<std::unique_ptr<Numbers>> numbers;
    std::vector<std::shared_ptr<Task>> tasks;
    for (int index = 0; index < 60; ++index) {
      numbers.push_back(std::make_unique<Numbers>(member, index % 5 == 0 ? 10 : kCount,
                                                  index % 2 == member.rank % 2));
      (*numbers.back())[0] = index + member.rank;
      auto call = call_of(Kind::kAllReduce, numbers.back()->size());
      call.data = numbers.back()->bytes();
      tasks.push_back(member.start(call));
    }
    // Each rank waits for another one first; two threads wait at once.
    std::thread other([&] { member.queue->wait(*tasks[20 + member.rank], Queue::never()); });
    member.queue->wait(*tasks[40 - member.rank], Queue::never());
    other.join();
    for (int index = 0; index < 60; ++index) {
      member.queue->wait(*tasks[index], Queue::never());
      Member::check(*tasks[index]);
      check_that((*numbers[index])[0] == 3 * index + 3, "sum");
    }
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a wait that ends early leaves the call to go on, and its result comes") {
  std::atomic<bool> may_come{false};
  const auto errors = run_ranks(2, [&](Member& member) {
    Numbers numbers(member, 30000, false);
    numbers[29999] = member.rank + 1;
    auto call = call_of(Kind::kAllReduce, 30000);
    call.data = numbers.bytes();
    if (member.rank == 0) {
      const auto task = member.start(call);
      check_that(!member.queue->wait(*task, Clock::now() + milliseconds(20)), "done too early");
      check_that(!task->is_done(), "done too early");
      may_come = true;
      // Nobody waits: the queue's own thread does it.
      while (!task->is_done()) {
        std::this_thread::yield();
      }
      Member::check(*task);
    } else {
      while (!may_come) {
        std::this_thread::yield();
      }
      member.run(call);
    }
    check_that(numbers[29999] == 3, "sum");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("calls that do not fit together fail on all ranks, with both ranks' words") {
  const auto differ = [](const Call& first, const Call& second) {
    const auto errors = run_ranks(3, [&](Member& member) {
      Numbers numbers(member, 100000, true);
      auto call = member.rank == 2 ? second : first;
      call.data = numbers.bytes();
      call.output = numbers.bytes();
      member.run(call);
    });
    CHECK_THAT(errors[0], contains("the ranks' calls do not fit together: rank 0 called "));
    CHECK(errors[1] == errors[0]);
    CHECK(errors[2] == errors[0]);
    return errors[0];
  };
  auto sum = call_of(Kind::kAllReduce, 10000);
  auto other = sum;
  other.count = 5;
  CHECK_THAT(differ(sum, other), contains("rank 0 called all_reduce(SUM) of 10000 elements (Int), "
                                          "rank 2 all_reduce(SUM) of 5 elements (Int)"));
  other = sum;
  other.op = Op::kMax;
  CHECK_THAT(differ(sum, other), contains("rank 2 all_reduce(MAX)"));
  other = sum;
  other.type = DataType::kFloat;
  CHECK_THAT(differ(sum, other), contains("10000 elements (Float)"));
  other.kind = Kind::kBroadcast;
  other.root = 1;
  CHECK_THAT(differ(sum, other), contains("rank 2 broadcast from rank 1 of 10000 elements"));
  auto from = other;
  from.root = 0;
  CHECK_THAT(differ(from, other), contains("broadcast from rank 0 of 10000"));
  other.kind = Kind::kReduce;
  CHECK_THAT(differ(sum, other), contains("rank 2 reduce(SUM) to rank 1"));
  other = call_of(Kind::kBarrier, 0);
  CHECK_THAT(differ(sum, other), contains(", rank 2 barrier"));
  auto bytes = call_of(Kind::kAllGather, 7);
  bytes.type = DataType::kOther;
  CHECK_THAT(differ(bytes, other), contains("all_gather of 7 bytes"));
}

TEST_CASE("a rank that leaves ends the others' calls, those that wait behind included") {
  std::atomic<int> waiting{0};
  const auto errors = run_ranks(3, [&](Member& member) {
    if (member.rank == 1) {
      while (waiting < 2) {
        std::this_thread::yield();
      }
      return;  // leaves
    }
    const auto first = member.start(Call());
    const auto second = member.start(Call());
    ++waiting;
    member.queue->wait(*second, Queue::never());
    check_that(first->error() != nullptr, "no error");
    try {
      Member::check(*second);
    } catch (const ShmError& error) {
      check_that(
          std::string(error.what()).find("an earlier collective of the group has failed: ") == 0,
          error.what());
    }
    Member::check(*first);
  });
  // One of the two may hear of the other's end first.
  CHECK((errors[0] == "rank 1 has left the group" || errors[2] == "rank 1 has left the group"));
  CHECK_THAT(errors[0] + errors[2], contains("has left the group"));
}

TEST_CASE("a rank that does not come is named after the timeout") {
  std::atomic<bool> is_over{false};
  const auto errors = run_ranks(2, [&](Member& member) {
    if (member.rank == 1) {
      while (!is_over) {
        std::this_thread::yield();
      }
      return;
    }
    Call call;
    call.timeout = milliseconds(100);
    try {
      member.run(call);
    } catch (const ShmError& error) {
      is_over = true;
      throw;
    }
  });
  CHECK(errors[0] == "it timed out after 0.1 s: rank 1 has not come to it");
  CHECK(errors[1].empty());
}

TEST_CASE("a call that another rank has given up fails for who comes to it later, too") {
  // All that it needs is there when it comes.
  for (const auto kind : {Kind::kBarrier, Kind::kAllReduce}) {
    std::atomic<bool> is_over{false};
    const auto errors = run_ranks(3, [&](Member& member) {
      std::vector<float> values(4, 1.0F);
      Call call;
      call.kind = kind;
      if (kind == Kind::kAllReduce) {
        call.type = DataType::kFloat;
        call.count = values.size();
        call.data = reinterpret_cast<std::byte*>(values.data());
      }
      if (member.rank == 1) {
        while (!is_over) {
          std::this_thread::yield();
        }
        member.run(call);
        return;
      }
      call.timeout = milliseconds(100);
      try {
        member.run(call);
      } catch (const ShmError& error) {
        is_over = true;
        throw;
      }
    });
    CHECK_THAT(errors[1], contains("has left the group"));
  }
}

TEST_CASE("leaving ends this rank's own waits") {
  std::atomic<bool> is_waiting{false};
  std::atomic<bool> is_over{false};
  const auto errors = run_ranks(2, [&](Member& member) {
    if (member.rank == 1) {
      while (!is_over) {
        std::this_thread::yield();
      }
      return;
    }
    const auto task = member.start(Call());
    std::thread waiter([&] {
      is_waiting = true;
      member.queue->wait(*task, Queue::never());
    });
    while (!is_waiting) {
      std::this_thread::yield();
    }
    member.queue->leave();
    waiter.join();
    is_over = true;
    Member::check(*task);
  });
  CHECK(errors[0] == "this rank has left the group");
}

TEST_CASE("sums do not depend on which rank comes first") {
  std::vector<std::vector<float>> results;
  for (const int first : {0, 1, 2}) {
    std::atomic<int> next{first};
    std::vector<float> result;
    const auto errors = run_ranks(3, [&](Member& member) {
      std::vector<float> values(50000);
      for (std::size_t index = 0; index < values.size(); ++index) {
        values[index] =
            1.0F / static_cast<float>(index * 3 + static_cast<std::size_t>(member.rank) + 1);
      }
      Call call;
      call.kind = Kind::kAllReduce;
      call.type = DataType::kFloat;
      call.count = values.size();
      call.data = reinterpret_cast<std::byte*>(values.data());
      while (next % 3 != member.rank) {
        std::this_thread::yield();
      }
      const auto task = member.start(call);
      ++next;
      member.queue->wait(*task, Queue::never());
      Member::check(*task);
      if (member.rank == first) {
        result = values;
      }
    });
    CHECK(errors == std::vector<std::string>(3));
    results.push_back(result);
  }
  CHECK(results[1] == results[0]);
  CHECK(results[2] == results[0]);
}
