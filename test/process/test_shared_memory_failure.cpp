#include <csignal>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>
#include <unistd.h>

#include <ddp/ddp.h>

// The backend "shm" on forked ranks: ranks that do not call the same, that die, stop or leave.

using ddp::ReduceOp;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;
using ddp::test::Trigger;
using ddp::test::within;
using std::chrono::milliseconds;

namespace {

void start(milliseconds timeout = milliseconds(60000)) {
  ddp::init_process_group(ddp::InitProcessGroupOptions("shm").timeout(timeout));
}

/// The words of c10d's own work, which come before the library asks the store what the others say.
std::string error_of(const std::function<c10::intrusive_ptr<c10d::Work>()>& act) {
  try {
    act()->wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(none)";
}

at::Tensor tensor_in(bool shared, std::int64_t count) {
  return shared ? ddp::default_group()
                      ->getBackend(c10::DeviceType::CPU)
                      ->allocateTensor(count, at::TensorOptions(at::kFloat))
                      .zero_()
                : at::zeros({count});
}

}  // namespace

TEST_CASE("calls that differ between the ranks are an error on all of them, with both calls") {
  struct Case {
    std::function<void(int)> act;
    std::string text;
  };
  const std::vector<Case> cases = {
      {[](int rank) {
         if (rank == 1) {
           ddp::barrier();
         } else {
           ddp::all_reduce(at::ones({3}));
         }
       },
       "rank 0 called all_reduce(SUM) of 3 elements (Float), rank 1 barrier"},
      {[](int rank) { ddp::all_reduce(at::ones({3}, rank == 1 ? at::kDouble : at::kFloat)); },
       "rank 0 called all_reduce(SUM) of 3 elements (Float), rank 1 all_reduce(SUM) of 3 elements "
       "(Double)"},
      {[](int rank) { ddp::all_reduce(at::ones({3}), rank == 1 ? ReduceOp::MAX : ReduceOp::MIN); },
       "rank 0 called all_reduce(MIN) of 3 elements (Float), rank 1 all_reduce(MAX)"},
      {[](int rank) { ddp::all_reduce(at::ones({rank == 1 ? 5 : 300000})); },
       "rank 0 called all_reduce(SUM) of 300000 elements (Float), rank 1 all_reduce(SUM) of 5 "
       "elements (Float)"},
      {[](int rank) { ddp::broadcast(at::ones({3}), rank); },
       "rank 0 called broadcast from rank 0 of 3 elements (Float), rank 1 broadcast from rank 1"},
      {[](int rank) { ddp::reduce(at::ones({3}), rank); },
       "rank 0 called reduce(SUM) to rank 0 of 3 elements (Float), rank 1 reduce(SUM) to rank 1"},
  };
  for (const auto& differing : cases) {
    const auto results = run_ranks(2, [&](const Rank& rank) {
      start();
      differing.act(rank.rank());
    });
    INFO(summary(results));
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(results[rank].error_type == "CommunicationError");
      CHECK_THAT(results[rank].error, contains("rank " + std::to_string(rank) + " of 2: ") &&
                                          contains("the ranks' calls do not fit together: ") &&
                                          contains(differing.text));
    }
  }
}

TEST_CASE("a rank that is killed in the middle of a collective is named by the others, soon") {
  for (const bool shared : {false, true}) {
    const auto results =
        run_ranks(3,
                  [&](const Rank& rank) {
                    start();
                    std::vector<at::Tensor> tensors{tensor_in(shared, 4000000)};
                    ddp::default_group()->allreduce(tensors)->wait();
                    ddp::barrier();
                    rank.report("runs", 1);
                    std::string error;
                    do {
                      error = error_of([&] { return ddp::default_group()->allreduce(tensors); });
                    } while (error == "(none)");
                    rank.report("error", error);
                    rank.report("next", error_of([&] { return ddp::default_group()->barrier(); }));
                  },
                  within(50), {{1, "runs", [](int pid) { kill(pid, SIGKILL); }}});
    INFO(summary(results));
    CHECK(results[1].status == 128 + SIGKILL);
    for (const int rank : {0, 2}) {
      CHECK(results[rank].status == 0);
      // The other of the two may have noticed first, and left.
      CHECK_THAT(results[rank]["error"],
                 contains("rank 1 has ended (process ") ||
                     contains("rank " + std::to_string(2 - rank) + " has left the group"));
      CHECK_THAT(results[rank]["next"],
                 contains("an earlier collective of the group has failed: "));
      // Of a timeout of a minute.
      CHECK(results[rank].arrived.at("error") - results[1].seconds < 5);
    }
    CHECK_THAT(results[0]["error"] + results[2]["error"], contains("rank 1 has ended (process "));
  }
}

TEST_CASE("a rank that is stopped in the middle of a collective is named after the timeout") {
  pid_t stopped = 0;
  const Trigger stop{1, "runs", [&](int pid) {
                       stopped = pid;
                       kill(pid, SIGSTOP);
                     }};
  const Trigger end{0, "error", [&](int) { kill(stopped, SIGKILL); }};
  const auto results =
      run_ranks(2,
                [](const Rank& rank) {
                  start(milliseconds(1000));
                  std::vector<at::Tensor> tensors{at::zeros({4000000})};
                  rank.report("runs", 1);
                  std::string error;
                  do {
                    error = error_of([&] { return ddp::default_group()->allreduce(tensors); });
                  } while (error == "(none)");
                  rank.report("error", error);
                },
                within(30), {stop, end});
  INFO(summary(results));
  CHECK(results[0]["error"] == "it timed out after 1.0 s: rank 1 has not come to it");
}

TEST_CASE("each operation has its own bound, and a rank that comes late is named") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    ddp::barrier();
    const auto store = ddp::default_group()->getStore();
    if (rank.rank() == 2) {
      store->wait({"noticed"});
      ddp::destroy_process_group();
      return;
    }
    std::vector<at::Tensor> tensors{at::ones({5})};
    c10d::AllreduceOptions options;
    options.timeout = milliseconds(300);
    const auto work = ddp::default_group()->allreduce(tensors, options);
    // The wait's own limit ends the wait alone.
    RANK_CHECK(error_of([&] {
                 work->wait(milliseconds(1));
                 return work;
               }).find("the collective is not done after 1 ms") == 0);
    RANK_CHECK(!work->isCompleted() || !work->isSuccess());
    rank.report("error", error_of([&] { return work; }));
    RANK_CHECK(work->isCompleted() && !work->isSuccess() && work->exception());
    rank.report("future", error_of([&] {
                  work->getFuture()->wait();
                  work->getFuture()->value();
                  return work;
                }));
    store->set("noticed", "yes");
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const int rank : {0, 1}) {
    CHECK(results[rank].status == 0);
    CHECK_THAT(results[rank]["error"],
               contains("it timed out after 0.3 s: rank 2 has not come to it") ||
                   contains("rank " + std::to_string(1 - rank) + " has left the group"));
    CHECK(results[rank]["future"] == results[rank]["error"]);
  }
  CHECK(results[2].status == 0);
}

TEST_CASE("abort ends this rank's operations, and those of the others at once") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    const auto group = ddp::default_group();
    const auto store = group->getStore();
    if (rank.rank() == 2) {
      store->wait({"rank 0 has failed", "rank 1 has failed"});
      ddp::destroy_process_group();
      return;
    }
    std::vector<at::Tensor> tensors{at::ones({100000})};
    const auto first = group->barrier();
    const auto second = group->allreduce(tensors);
    if (rank.rank() == 0) {
      store->set("rank 0 waits", "yes");
    }
    std::thread other([&] {
      if (rank.rank() == 1) {
        store->wait({"rank 0 waits"});
        group->abort();
      }
    });
    rank.report("first", error_of([&] { return first; }));
    rank.report("second", error_of([&] { return second; }));
    other.join();
    store->set("rank " + std::to_string(rank.rank()) + " has failed", "yes");
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const int rank : {0, 1}) {
    CHECK(results[rank].status == 0);
    CHECK_THAT(results[rank]["second"],
               contains("an earlier collective of the group has failed: ") &&
                   contains(results[rank]["first"]));
    CHECK(results[rank].seconds < 20);
  }
  CHECK_THAT(results[0]["first"], contains("rank 1 has left the group"));
  CHECK_THAT(results[1]["first"],
             contains("this rank has left the group") || contains("rank 0 has left the group"));
  CHECK(results[2].status == 0);
}
