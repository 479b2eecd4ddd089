#include <algorithm>
#include <csignal>
#include <fstream>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>
#include <unistd.h>

#include <ddp/ddp.h>
#include <ddp/process_group/group_registry.h>

// The ends of a group: good-byes, exits without them, and stores that stop or die.

using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;
using ddp::test::Trigger;
using ddp::test::within;
using std::chrono::milliseconds;

namespace {

void start(milliseconds timeout = milliseconds(10000)) {
  ddp::init_process_group(ddp::InitProcessGroupOptions(ddp::test::backend()).timeout(timeout));
}

void all_reduce() { ddp::all_reduce(at::ones({1000})); }

/// The process's state as the kernel calls it: 'T' is stopped.
/// 'X' where there is no such process.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end == std::string::npos ? 'X' : line.at(name_end + 2);
}

double seconds_of(const std::function<void()>& act) {
  const auto start_time = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_time).count();
}

}  // namespace

TEST_CASE("C27: rank 0 leaves at once, and its store stays until the last good-bye") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    all_reduce();
    if (rank.rank() == 0) {
      const auto store = ddp::default_group()->getStore();
      store->set("message", std::string("from rank 0"));
      store->set("process", std::to_string(getpid()));
      ddp::destroy_process_group();
      return;
    }
    const auto store = ddp::default_group()->getStore();
    const auto server = std::stoi(store->get_to_str("process"));
    // Rank 0 has called destroy_process_group(), and would now end if it did not wait.
    store->wait({"ddp/goodbye/0"});
    const auto patience = std::chrono::steady_clock::now() + milliseconds(1000);
    while (std::chrono::steady_clock::now() < patience && state_of(server) != 'X') {
      std::this_thread::yield();
    }
    rank.report("message", store->get_to_str("message"));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[1]["message"] == "from rank 0");
  CHECK(results[0].seconds > results[1].seconds - 1);
}

TEST_CASE("a rank that never says good-bye does not hold the others for ever") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start(milliseconds(1000));
    all_reduce();
    if (rank.rank() == 2) {
      _exit(0);
    }
    int words[2];
    RANK_CHECK(pipe(words) == 0);
    const int standard_error = dup(STDERR_FILENO);
    dup2(words[1], STDERR_FILENO);
    rank.report("seconds", seconds_of([] { ddp::destroy_process_group(); }));
    dup2(standard_error, STDERR_FILENO);
    close(words[1]);
    char text[4096];
    const auto length = read(words[0], text, sizeof(text));
    rank.report("words", std::string(text, static_cast<std::size_t>(std::max<ssize_t>(length, 0))));
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK_THAT(results[0]["words"], contains("no good-bye from rank 2; closing the store"));
  CHECK(std::stod(results[0]["seconds"]) < 4);
  CHECK(results[1].status == 0);
}

TEST_CASE("programs that end without destroy_process_group neither crash nor hang") {
  for (const std::string way : {"return", "exit", "_exit", "thread"}) {
    const auto results = run_ranks(
        2,
        [&](const Rank& rank) {
          start();
          all_reduce();
          rank.report("reduced", 1);
          if (way == "exit") {
            std::exit(3);
          }
          if (way == "_exit") {
            _exit(4);
          }
          if (way == "thread") {
            std::thread([] { std::exit(5); }).join();
          }
        },
        within(15));
    INFO(way << summary(results));
    for (const auto& result : results) {
      CHECK(result["reduced"] == "1");
      CHECK(result.status == (way == "return" ? 0 : way == "exit" ? 3 : way == "_exit" ? 4 : 5));
      CHECK(result.seconds < 8);
    }
  }
}

TEST_CASE("an uncaught exception ends the rank, and its peer learns of it") {
  const auto results = run_ranks(
      2,
      [](const Rank& rank) {
        start();
        all_reduce();
        if (rank.rank() == 1) {
          std::signal(SIGABRT, SIG_DFL);  // not the test runner's handler
          std::thread([] { throw std::runtime_error("a bug of the program"); }).join();
        }
        all_reduce();
      },
      within(15));
  INFO(summary(results));
  CHECK(results[1].status == 128 + SIGABRT);
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error, contains("no word from rank 1: killed, stopped"));
  CHECK(results[0].seconds < 8);
}

TEST_CASE("exits in the middle of a collective, and of a failing group") {
  const auto results = run_ranks(
      3,
      [](const Rank& rank) {
        start();
        all_reduce();
        if (rank.rank() == 0) {
          // Never waited for: rank 2 does not come.
          auto work = ddp::all_reduce(at::ones({1000}), ddp::AllReduceOptions().async_op(true));
          rank.report("begun", 1);
          return;
        }
        if (rank.rank() == 1) {
          try {
            all_reduce();
          } catch (const ddp::CommunicationError& error) {
            rank.report("error", error.what());
          }
          std::exit(7);
        }
        try {
          ddp::recv(at::ones({1}), 0);
        } catch (const ddp::CommunicationError&) {
        }
        std::exit(8);
      },
      within(20));
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 7);
  CHECK(results[2].status == 8);
  CHECK_THAT(results[1]["error"], contains("all_reduce failed"));
  for (const auto& result : results) {
    CHECK(result.seconds < 8);
  }
}

TEST_CASE("a store that stops answering: every call of the channel ends, and so does the program") {
  pid_t stopped = 0;
  const Trigger stop{0, "stop", [&](int pid) {
                       stopped = pid;
                       kill(pid, SIGSTOP);
                     }};
  const Trigger done{1, "destroy", [&](int) { kill(stopped, SIGKILL); }};
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const auto results = run_ranks(
      2,
      [&](const Rank& rank) {
        start(milliseconds(1500));
        const auto channel = ddp::detail::channel_of(ddp::default_group());
        channel->decide(
            "first", "", [](const auto&) { return ""; }, "come");
        ddp::barrier();
        pid_t server = getpid();
        if (rank.rank() == 0) {
          RANK_CHECK(write(ready[1], &server, sizeof(server)) == sizeof(server));
          rank.report("stop", "now");
          pause();
        }
        RANK_CHECK(read(ready[0], &server, sizeof(server)) == sizeof(server));
        while (state_of(server) != 'T') {
          std::this_thread::yield();
        }
        const auto timed = [&](const std::string& name, const std::function<void()>& act) {
          rank.report(name, seconds_of(act));
        };
        timed("decide seconds", [&] {
          try {
            channel->decide(
                "second", "", [](const auto&) { return ""; }, "made its model");
          } catch (const ddp::CommunicationError& error) {
            rank.report("decide", error.what());
          }
        });
        timed("all_failed", [&] { channel->all_failed("model", 1, "x", milliseconds(300)); });
        timed("reports",
              [&] { rank.report("reports text", channel->reports_of_others(milliseconds(300))); });
        timed("abort", [&] { channel->abort("a reason"); });
        timed("destroy", [] { ddp::destroy_process_group(); });
      },
      within(25), {stop, done});
  close(ready[0]);
  close(ready[1]);
  INFO(summary(results));
  const auto& result = results[1];
  CHECK(result.status == 0);
  CHECK_THAT(result["decide"], contains("rank 1: cannot learn whether rank 0 has made its model"));
  CHECK_THAT(result["decide"], contains("does not answer: it is stopped"));
  CHECK_THAT(result["reports text"], contains("does not answer: it is stopped"));
  CHECK(std::stod(result["decide seconds"]) < 5);
  for (const auto* name : {"all_failed", "reports", "abort", "destroy"}) {
    CHECK(std::stod(result[name]) < 4);
  }
}

TEST_CASE("a store whose process is killed: every call of the channel says so at once") {
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start(milliseconds(8000));
    const auto channel = ddp::detail::channel_of(ddp::default_group());
    channel->decide(
        "first", "", [](const auto&) { return ""; }, "come");
    ddp::barrier();
    if (rank.rank() == 0) {
      raise(SIGKILL);
    }
    rank.report("seconds", seconds_of([&] {
                  try {
                    channel->decide(
                        "second", "", [](const auto&) { return ""; }, "made its model");
                  } catch (const ddp::CommunicationError& error) {
                    rank.report("decide", error.what());
                  }
                  channel->all_failed("model", 1, "x", milliseconds(5000));
                  rank.report("reports", channel->reports_of_others(milliseconds(5000)));
                  channel->abort("a reason");
                  ddp::destroy_process_group();
                }));
  });
  INFO(summary(results));
  CHECK(results[1].status == 0);
  CHECK_THAT(results[1]["decide"],
             contains("rank 1: cannot learn whether rank 0 has made its model: the store's"));
  CHECK_THAT(results[1]["decide"],
             contains("connection is closed: the process that serves it has ended"));
  CHECK_THAT(results[1]["reports"], contains("connection is closed"));
  CHECK_THAT(results[1]["reports"], contains("rank 0"));
  CHECK(std::stod(results[1]["seconds"]) < 4);
}

TEST_CASE("a rank that does not come to a decision is told from a store that is gone") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start(milliseconds(2000));
    ddp::barrier();  // else rank 1 might end while rank 0 still connects
    const auto channel = ddp::detail::channel_of(ddp::default_group());
    if (rank.rank() == 0) {
      try {
        channel->decide(
            "model", "", [](const auto&) { return ""; }, "made its model");
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK_THAT(results[0]["error"], contains("rank 0: rank 1 has not made its model within 2.0 s"));
}

TEST_CASE("C04: a rank with fewer batches finishes; the others' collective ends and says so") {
  const int first = GENERATE(0, 1);
  const auto results = run_ranks(
      2,
      [&](const Rank& rank) {
        start(milliseconds(60000));
        ddp::barrier();
        if (rank.rank() != first) {
          all_reduce();
        }
        ddp::destroy_process_group();
      },
      within(50));
  INFO(summary(results));
  CHECK(results[first].status == 0);
  const auto& other = results[1 - first];
  CHECK(other.error_type == "CommunicationError");
  CHECK_THAT(other.error, contains("rank " + std::to_string(first) +
                                   " finished and called ddp::destroy_process_group()"));
}
