#include <algorithm>
#include <arpa/inet.h>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <sys/resource.h>
#include <sys/socket.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/ddp.h>

// Every way to start, and sub-groups, on forked ranks over Gloo.

using ddp::InitProcessGroupOptions;
using ddp::test::Rank;
using ddp::test::RankOptions;
using ddp::test::ReservedPort;
using ddp::test::run_ranks;
using ddp::test::summary;
using std::chrono::milliseconds;

namespace {

/// Users of a FileStore, so many that its file stays.
constexpr int kMany = 1000;

InitProcessGroupOptions over(const std::string& method,
                             milliseconds timeout = milliseconds(15000)) {
  return InitProcessGroupOptions(ddp::test::backend()).init_method(method).timeout(timeout);
}

float sum_of_ranks(const ddp::ProcessGroup& group = {}) {
  const auto tensor = at::full({4}, static_cast<float>(ddp::get_rank() + 1));
  ddp::all_reduce(tensor, {}, group);
  return tensor[3].item<float>();
}

void sum_and_destroy(const Rank& rank) {
  rank.report("sum", sum_of_ranks());
  ddp::destroy_process_group();
}

/// A folder of the test's own, which goes with it.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/ddp_test_XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name = "meet") const { return path_ + "/" + name; }

 private:
  std::string path_;
};

void check_sums(const std::vector<ddp::test::RankResult>& results, const std::string& sum) {
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["sum"] == sum);
  }
}

bool has_ipv6() {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool works =
      fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return works;
}

}  // namespace

TEST_CASE("tcp://, with rank and world_size in the options, in the query, and over a host name") {
  const ReservedPort one;
  check_sums(
      run_ranks(2,
                [&](const Rank& rank) {
                  ddp::init_process_group(over("tcp://127.0.0.1:" + std::to_string(one.port()))
                                              .rank(rank.rank())
                                              .world_size(rank.world_size()));
                  sum_and_destroy(rank);
                }),
      "3.000000");
  const ReservedPort two;
  check_sums(run_ranks(2,
                       [&](const Rank& rank) {
                         ddp::init_process_group(
                             over("tcp://localhost:" + std::to_string(two.port()) +
                                  "?world_size=2&rank=" + std::to_string(rank.rank())));
                         sum_and_destroy(rank);
                       }),
             "3.000000");
}

TEST_CASE("IPv6") {
  if (!has_ipv6()) {
    WARN("no IPv6 on loopback: skipped");
    return;
  }
  const ReservedPort port;
  check_sums(run_ranks(2,
                       [&](const Rank& rank) {
                         ddp::init_process_group(over("tcp://[::1]:" + std::to_string(port.port()))
                                                     .rank(rank.rank())
                                                     .world_size(rank.world_size()));
                         sum_and_destroy(rank);
                       }),
             "3.000000");
}

TEST_CASE("file://, twice in a row on one path, and the file goes with the last rank") {
  const Folder folder;
  const auto results = run_ranks(3, [&](const Rank& rank) {
    for (int round = 0; round < 2; ++round) {
      ddp::init_process_group(
          over("file://" + folder.file() + "?world_size=3&rank=" + std::to_string(rank.rank())));
      sum_and_destroy(rank);
    }
  });
  check_sums(results, "6.000000");
  // Of either round.
  CHECK(std::filesystem::is_empty(std::filesystem::path(folder.file()).parent_path()));
}

TEST_CASE("a stale file of an earlier run is named by each rank") {
  const Folder folder;
  const auto url = "file://" + folder.file();
  const auto killed = run_ranks(3, [&](const Rank& rank) {
    // Rank 2 is killed at once; of it, nothing is in the file.
    if (rank.rank() < 2) {
      c10d::FileStore keep(folder.file(), 3);
      try {
        ddp::init_process_group(over(url, milliseconds(600)).rank(rank.rank()).world_size(3));
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
      raise(SIGKILL);
    }
  });
  const auto next = run_ranks(3, [&](const Rank& rank) {
    ddp::init_process_group(over(url, milliseconds(1000)).rank(rank.rank()).world_size(3));
  });
  INFO(summary(killed) << summary(next));
  CHECK_THAT(killed[0]["error"],
             contains("rank 2 of the group \"0\" did not come to " + folder.file()));
  for (const auto& result : next) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error,
               contains("the file " + folder.file() + " is left from an earlier run"));
    CHECK_THAT(result.error, contains("that did not end cleanly (rank "));
    CHECK_THAT(result.error, contains("delete it"));
  }
}

TEST_CASE("a file that cannot be a store is named") {
  const Folder folder;
  const auto error = [&](const std::string& path) {
    const auto results = run_ranks(1, [&](const Rank&) {
      ddp::init_process_group(over("file://" + path, milliseconds(500)).rank(0).world_size(1));
    });
    CHECK(results[0].error_type == "UsageError");
    return results[0].error;
  };
  CHECK_THAT(error(folder.file("none/meet")),
             contains("there is no folder " + folder.file("none")));
  std::filesystem::create_directory(folder.file("folder"));
  CHECK_THAT(error(folder.file("folder")), contains("is not a file that can be read and written"));
}

TEST_CASE("a file that cannot be written is named, with the system's words") {
  const Folder folder;
  const auto results = run_ranks(1, [&](const Rank&) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{0, 0};
    RANK_CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    ddp::init_process_group(
        over("file://" + folder.file(), milliseconds(500)).rank(0).world_size(1));
  });
  INFO(summary(results));
  CHECK(results[0].error_type == "UsageError");
  CHECK_THAT(results[0].error,
             contains("the file " + folder.file()) && contains(" cannot be used as a store ("));
}

TEST_CASE("two processes with one rank at one file") {
  const Folder folder;
  const auto results = run_ranks(2, [&](const Rank&) {
    ddp::init_process_group(
        over("file://" + folder.file(), milliseconds(2000)).rank(0).world_size(2));
  });
  INFO(summary(results));
  // The first to come waits for rank 1, and sees to it that the other one is refused.
  const auto& refused = results[0].error_type == "UsageError" ? results[0] : results[1];
  CHECK(refused.error_type == "UsageError");
  CHECK_THAT(refused.error, contains("rank 0: another process uses the file " + folder.file()));
}

TEST_CASE("a program's own store that throws, or closes while the ranks connect") {
  const ReservedPort port;
  const auto results = run_ranks(2, [&](const Rank& rank) {
    struct Broken : c10d::HashStore {
      c10::intrusive_ptr<c10d::Store> clone() override { throw std::runtime_error("out of paper"); }
    };
    const auto from = [](const c10::intrusive_ptr<c10d::Store>& store) {
      ddp::init_process_group(InitProcessGroupOptions().store(store).rank(1).world_size(2).timeout(
          milliseconds(15000)));
    };
    if (rank.rank() == 1) {
      try {
        from(c10::make_intrusive<Broken>());
      } catch (const ddp::CommunicationError& error) {
        rank.report("broken", error.what());
      }
    }
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port.port());
    options.isServer = rank.rank() == 0;
    options.waitWorkers = false;
    const c10::intrusive_ptr<c10d::Store> store =
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    if (rank.rank() == 1) {
      store->set("connecting", std::string("1"));
      from(store);
    } else {
      store->wait({"connecting"});
      // What rank 1 leaves there as a member, below the group's prefixes.
      store->wait({"0//ddp/member/1"});
    }
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK_THAT(results[1]["broken"],
             contains("failed before all ranks were connected (out of paper"));
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error, contains("was closed before all ranks were connected"));
}

TEST_CASE("a store of the program's own, kept by the program, twice") {
  const ReservedPort port;
  check_sums(run_ranks(2,
                       [&](const Rank& rank) {
                         c10d::TCPStoreOptions options;
                         options.port = static_cast<std::uint16_t>(port.port());
                         options.isServer = rank.rank() == 0;
                         options.waitWorkers = false;
                         const auto store =
                             c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
                         for (int round = 0; round < 2; ++round) {
                           ddp::init_process_group(InitProcessGroupOptions()
                                                       .store(store)
                                                       .rank(rank.rank())
                                                       .world_size(rank.world_size())
                                                       .timeout(milliseconds(15000)));
                           sum_and_destroy(rank);
                         }
                       }),
             "3.000000");
}

TEST_CASE("ranks that leave at once leave none behind that still connects") {
  // Holds Gloo's first question for an address until the others have left, or for a while.
  class LateStore final : public c10d::FileStore {
   public:
    LateStore(const std::string& path, std::vector<std::string> left)
        : FileStore(path, kMany), left_(std::move(left)) {}
    c10::intrusive_ptr<c10d::Store> clone() override {
      return c10::make_intrusive<FileStore>(getPath(), kMany);
    }
    std::vector<std::uint8_t> get(const std::string& key) override {
      if (key.find("/cpu/") != std::string::npos) {
        const auto deadline = std::chrono::steady_clock::now() + milliseconds(500);
        while (!std::all_of(left_.begin(), left_.end(), [](const std::string& file) {
          return std::filesystem::exists(file);
        }) && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(milliseconds(5));
        }
        left_.clear();
      }
      return FileStore::get(key);
    }

   private:
    std::vector<std::string> left_;
  };

  // Which end of a pair connects and which one listens is Gloo's choice, by chance.
  constexpr int kRanks = 5;
  constexpr int kLate = 1;
  const Folder folder;
  const auto results = run_ranks(kRanks, [&](const Rank& rank) {
    std::vector<std::string> left;
    for (int other = 0; other < kRanks && rank.rank() == kLate; ++other) {
      if (other != kLate) {
        left.push_back(folder.file("left" + std::to_string(other)));
      }
    }
    ddp::init_process_group(
        InitProcessGroupOptions("gloo")
            .store(c10::make_intrusive<LateStore>(folder.file("meet"), std::move(left)))
            .rank(rank.rank())
            .world_size(kRanks)
            .timeout(milliseconds(20000)));
    ddp::destroy_process_group();
    std::ofstream(folder.file("left" + std::to_string(rank.rank())));
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE("a rank that does not say that it is connected") {
  using Event = std::function<void(c10d::Store&, const std::string&)>;
  // Does something when Gloo has connected the rank and it is about to say so.
  class OddStore final : public c10d::FileStore {
   public:
    OddStore(const std::string& path, Event event)
        : FileStore(path, kMany), event_(std::move(event)) {}
    c10::intrusive_ptr<c10d::Store> clone() override {
      return c10::make_intrusive<OddStore>(getPath(), event_);
    }
    void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
      if (event_ && key.find("ddp/connected/") != std::string::npos) {
        event_(*this, key);
      }
      FileStore::set(key, value);
    }

   private:
    const Event event_;
  };
  constexpr int kOdd = 1;
  // Of three ranks, the event on rank 1.
  const auto results_of = [](const Event& event, milliseconds timeout, milliseconds odd_timeout) {
    const Folder folder;
    auto results = run_ranks(3, [&](const Rank& rank) {
      const bool is_odd = rank.rank() == kOdd;
      ddp::init_process_group(
          InitProcessGroupOptions("gloo")
              .store(c10::make_intrusive<OddStore>(folder.file("meet"), is_odd ? event : nullptr))
              .rank(rank.rank())
              .world_size(rank.world_size())
              .timeout(is_odd ? odd_timeout : timeout));
    });
    UNSCOPED_INFO(summary(results));
    for (const auto& result : results) {
      CHECK((result.error_type == "CommunicationError" || result.status == 128 + SIGKILL));
    }
    return results;
  };
  const auto of_rank = [](int rank, const std::string& text) {
    return contains("rank " + std::to_string(rank) + ": " + text);
  };

  SECTION("killed, and missed at once") {
    // When the others have said so, and Gloo needs it no more.
    const auto results = results_of(
        [](c10d::Store& store, std::string key) {
          for (const char rank : {'0', '2'}) {
            key.back() = rank;
            store.wait({key}, milliseconds(20000));
          }
          std::raise(SIGKILL);
        },
        milliseconds(60000), milliseconds(60000));
    for (const int rank : {0, 2}) {
      CHECK_THAT(results[rank].error, of_rank(rank,
                                              "a rank left before all were connected: rank 1 "
                                              "has not said that it is"));
      CHECK(results[rank].seconds < 20);  // not the group's timeout
    }
  }
  SECTION("its store holds it") {
    const auto results = results_of([](auto&...) { std::promise<void>().get_future().wait(); },
                                    milliseconds(2000), milliseconds(5000));
    for (const int rank : {0, 2}) {
      CHECK_THAT(results[rank].error,
                 of_rank(rank, "rank 1 has not connected to all others within 2.0 s"));
    }
    CHECK_THAT(results[kOdd].error, of_rank(kOdd,
                                            "cannot learn whether rank 1 is connected: the "
                                            "process that serves the store does not answer"));
  }
  SECTION("its store fails") {
    const auto results = results_of([](auto&...) { throw std::runtime_error("the disk is full"); },
                                    milliseconds(60000), milliseconds(60000));
    CHECK_THAT(results[kOdd].error,
               of_rank(kOdd, "cannot learn whether rank 1 is connected: the disk is full"));
  }
}

TEST_CASE("a store beside an init_method, or without a rank, is refused") {
  const Folder folder;
  const auto results = run_ranks(2, [&](const Rank& rank) {
    const auto store =
        c10::make_intrusive<c10d::FileStore>(folder.file(std::to_string(rank.rank())), 1);
    auto options = InitProcessGroupOptions().store(store);
    ddp::init_process_group(rank.rank() == 0 ? options.init_method("env://") : options);
  });
  INFO(summary(results));
  CHECK_THAT(results[0].error, contains("either a store or an init_method"));
  CHECK_THAT(results[1].error, contains("needs rank and world_size beside it; found rank -1"));
}

TEST_CASE("sub-groups: own ranks, own sequence, several at once, one destroyed") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    ddp::init_process_group(over("env://"));
    const auto pair = ddp::new_group({2, 0});
    const auto all = ddp::new_group({});
    const auto again = ddp::new_group({0, 2});
    rank.report("member", ddp::is_member(pair));
    rank.report("who", std::to_string(ddp::get_rank(pair)) + "/" +
                           std::to_string(ddp::get_world_size(pair)));
    if (ddp::is_member(pair)) {
      // More collectives in one group than in the others: their sequences are their own.
      sum_of_ranks(pair);
      rank.report("pair", sum_of_ranks(pair));
      rank.report("again", sum_of_ranks(again));
      rank.report("global", ddp::get_global_rank(pair, 1));
      rank.report("group", ddp::get_group_rank(pair, 2));
      const auto token = at::full({1}, rank.rank());
      ddp::broadcast(token, 1, pair);
      rank.report("token", token.item<int>());
    }
    rank.report("all", sum_of_ranks(all));
    ddp::destroy_process_group(pair);
    rank.report("after", sum_of_ranks());
    if (ddp::is_member(again)) {
      rank.report("again after", sum_of_ranks(again));
    }
    ddp::destroy_process_group();
    rank.report("end", ddp::is_initialized());
  });
  INFO(summary(results));
  for (const int rank : {0, 2}) {
    CHECK(results[rank]["member"] == "1");
    CHECK(results[rank]["who"] == std::to_string(rank / 2) + "/2");
    CHECK(results[rank]["pair"] == "4.000000");
    CHECK(results[rank]["again"] == "4.000000");
    CHECK(results[rank]["again after"] == "4.000000");
    CHECK(results[rank]["global"] == "2");
    CHECK(results[rank]["group"] == "1");
    CHECK(results[rank]["token"] == "2");
  }
  CHECK(results[1]["member"] == "0");
  CHECK(results[1]["who"] == "-1/-1");
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["all"] == "6.000000");
    CHECK(result["after"] == "6.000000");
    CHECK(result["end"] == "0");
  }
}

TEST_CASE("non-members need not call new_group, and the order of disjoint groups is free") {
  const auto results = run_ranks(4, [](const Rank& rank) {
    ddp::init_process_group(over("env://"));
    if (rank.rank() < 2) {
      rank.report("sum", sum_of_ranks(ddp::new_group({0, 1})));
    } else {
      ddp::new_group({0, 1});
      rank.report("sum", sum_of_ranks(ddp::new_group({2, 3})));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0]["sum"] == "3.000000");
  CHECK(results[1]["sum"] == "3.000000");
  CHECK(results[2]["sum"] == "7.000000");
  CHECK(results[3]["sum"] == "7.000000");
}

TEST_CASE("what new_group refuses, and what refuses a non-member's group") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    const auto error = [&](const std::string& name, const std::function<void()>& act) {
      try {
        act();
      } catch (const ddp::UsageError& refusal) {
        rank.report(name, std::string(refusal.what()));
      }
    };
    error("early", [] { ddp::new_group({0}); });
    ddp::init_process_group(over("env://"));
    error("range", [] { ddp::new_group({0, 2}); });
    error("twice", [] { ddp::new_group({1, 0, 1}); });
    error("timeout", [] { ddp::new_group({0}, ddp::NewGroupOptions().timeout(milliseconds(-1))); });
    const auto group = ddp::new_group({1 - rank.rank()});
    const auto tensor = at::ones({2});
    error("all_reduce", [&] { ddp::all_reduce(tensor, {}, group); });
    error("barrier", [&] { ddp::barrier(group); });
    error("object", [&] { ddp::all_gather_object(std::string("x"), group); });
    error("ranks", [&] { ddp::get_process_group_ranks(group); });
    error("not in it", [&] { ddp::get_group_rank(ddp::default_group(), 2); });
    error("no rank of it", [&] { ddp::get_global_rank(ddp::default_group(), 2); });
    const auto own = ddp::new_group({rank.rank()});
    ddp::destroy_process_group(own);
    error("destroyed", [&] { ddp::get_process_group_ranks(own); });
    ddp::destroy_process_group(group);
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  const auto& result = results[0];
  CHECK_THAT(result["early"], contains("call ddp::init_process_group() first"));
  CHECK_THAT(result["range"],
             contains("the ranks are 0, 2; the default group has the ranks 0 to 1"));
  CHECK_THAT(result["twice"], contains("rank 1 is listed twice"));
  for (const auto* name : {"all_reduce", "barrier", "object", "ranks"}) {
    CHECK_THAT(result[name],
               contains("rank 0 is not a member of this group, which has the ranks 1"));
  }
  CHECK_THAT(result["timeout"],
             contains("timeout is -1 ms; it must be positive, or 0 for the default group's"));
  CHECK_THAT(result["not in it"], contains("rank 2 is not in the group"));
  CHECK_THAT(result["no rank of it"], contains("get_global_rank: 2 is not a rank of the group"));
  CHECK_THAT(result["destroyed"], contains("this process group was destroyed"));
  CHECK(result["sum"] == "3.000000");
}

TEST_CASE("a member that never makes the sub-group is named") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    ddp::init_process_group(over("env://"));
    if (rank.rank() != 1) {
      try {
        ddp::new_group({1, 2}, ddp::NewGroupOptions().timeout(milliseconds(700)));
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
    }
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK_THAT(results[2]["error"], contains("rank 2: rank 1 of the group"));
  CHECK_THAT(results[2]["error"], contains("did not come to new_group({1, 2}) within 0.7 s"));
  CHECK(results[2]["sum"] == "6.000000");
}
