#include <arpa/inet.h>
#include <csignal>
#include <sched.h>
#include <set>
#include <sys/socket.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/ddp.h>

// init_process_group with env:// over Gloo on forked ranks: what goes wrong before a group exists.

using ddp::test::Rank;
using ddp::test::RankOptions;
using ddp::test::ReservedPort;
using ddp::test::run_ranks;
using ddp::test::summary;
using std::chrono::milliseconds;

namespace {

void start(milliseconds timeout) {
  ddp::init_process_group(ddp::InitProcessGroupOptions(ddp::test::backend()).timeout(timeout));
}

float sum_of_ranks() {
  const auto tensor = at::full({4}, static_cast<float>(ddp::get_rank() + 1));
  ddp::all_reduce(tensor);
  return tensor[3].item<float>();
}

/// A program of another kind that has the port: it accepts, and never says a word.
class ForeignListener {
 public:
  ForeignListener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    REQUIRE(bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(listen(fd_, 8) == 0);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
  }
  ~ForeignListener() { close(fd_); }
  std::string port() const { return std::to_string(port_); }

 private:
  int fd_;
  int port_ = 0;
};

RankOptions with(std::map<std::string, std::string> environment) {
  RankOptions options;
  options.limit = std::chrono::seconds(20);
  options.environment = std::move(environment);
  return options;
}

std::size_t open_sockets() {
  std::size_t count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    count += getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 ? 1 : 0;
  }
  return count;
}

std::size_t threads() {
  std::size_t count = 0;
  for (int tries = 0; tries < 200; ++tries) {
    count = 0;
    FILE* status = fopen("/proc/self/status", "r");
    char line[256];
    while (fgets(line, sizeof(line), status) != nullptr) {
      sscanf(line, "Threads: %zu", &count);
    }
    fclose(status);
    if (count <= 1) {
      break;
    }
    usleep(10000);
  }
  return count;
}

}  // namespace

TEST_CASE("two ranks meet over the environment") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start(milliseconds(15000));
    rank.report("sum", sum_of_ranks());
    rank.report("who",
                std::to_string(ddp::get_rank()) + "/" + std::to_string(ddp::get_world_size()));
    rank.report("backend", ddp::get_backend());
    ddp::destroy_process_group();
    rank.report("after", ddp::is_initialized());
  });
  INFO(summary(results));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(results[rank].status == 0);
    CHECK(results[rank]["sum"] == "3.000000");
    CHECK(results[rank]["who"] == std::to_string(rank) + "/2");
    CHECK(results[rank]["backend"] == ddp::test::backend());
    CHECK(results[rank]["after"] == "0");
  }
}

TEST_CASE("a peer that never comes is named by rank 0 and by all who came") {
  const auto results = run_ranks(4, [](const Rank& rank) {
    if (rank.rank() == 0 || rank.rank() == 2) {
      start(milliseconds(1500));
    }
  });
  INFO(summary(results));
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error,
               contains("ranks 1, 3 of 4 did not come to the store at 127.0.0.1:"));
    CHECK_THAT(results[rank].error, contains("within 1.5 s"));
    CHECK_THAT(results[rank].error, contains("same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"));
    CHECK(results[rank].seconds < 8);
  }
  CHECK_THAT(results[2].error, contains("rank 2: "));
}

TEST_CASE("a rank 0 that never comes") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    if (rank.rank() == 1) {
      start(milliseconds(1000));
    }
  });
  INFO(summary(results));
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error, contains("rank 1: rank 0's store at 127.0.0.1:"));
  CHECK_THAT(results[1].error, contains("within 1.0 s"));
  CHECK_THAT(results[1].error, contains("Check that rank 0 has started"));
  CHECK(results[1].seconds < 6);
}

TEST_CASE("rank 0's word that it gave up reaches a rank that would wait for longer") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    if (rank.rank() != 2) {
      start(milliseconds(rank.rank() == 0 ? 1500 : 15000));
    }
  });
  INFO(summary(results));
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error,
             contains("rank 1: rank 0 gave up: rank 2 of 3 did not come to the store at"));
  CHECK(results[1].seconds < 8);
}

TEST_CASE("a rank 0 that is not on the machine of MASTER_ADDR is told so") {
  // An address for documentation: it is nobody's.
  const auto results = run_ranks(
      1, [](const Rank&) { start(milliseconds(700)); }, with({{"MASTER_ADDR", "198.51.100.1"}}));
  INFO(summary(results));
  CHECK(results[0].error_type == "UsageError");
  CHECK_THAT(results[0].error, contains("rank 0: cannot serve the store at 198.51.100.1:"));
}

TEST_CASE("a rank that starts again while rank 0 does not is told so") {
  int failed[2];
  REQUIRE(pipe(failed) == 0);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    char word = 0;
    start(milliseconds(15000));
    if (rank.rank() == 2) {
      // Meanwhile rank 0 waits for its good-bye, and keeps the store.
      RANK_CHECK(read(failed[0], &word, 1) == 1);
    }
    ddp::destroy_process_group();
    if (rank.rank() == 1) {
      try {
        start(milliseconds(700));
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
      RANK_CHECK(write(failed[1], &word, 1) == 1);
    }
  });
  close(failed[0]);
  close(failed[1]);
  INFO(summary(results));
  // The second where the time is over in the middle of an attempt.
  CHECK_THAT(results[1]["error"],
             contains("rank 1: rank 0 has not opened its store at 127.0.0.1:") ||
                 contains("could not be joined within 0.7 s"));
}

TEST_CASE("C24: a foreign listener on the port ends every rank, and is named") {
  const ForeignListener foreign;
  auto options = with({{"MASTER_PORT", foreign.port()}});
  options.reserve_port = false;
  const auto results = run_ranks(
      2, [](const Rank&) { start(milliseconds(1500)); }, options);
  INFO(summary(results));
  CHECK(results[0].error_type == "UsageError");
  CHECK_THAT(results[0].error,
             contains("127.0.0.1:" + foreign.port() + " is already in use by another process"));
  CHECK_THAT(results[0].error, contains("`launch --master_port`"));
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error,
             contains("the store at 127.0.0.1:" + foreign.port() + " did not answer within 1.5 s"));
  CHECK_THAT(results[1].error, contains("something else listens on that port"));
  CHECK(results[1].seconds < 8);
}

TEST_CASE("an unknown host, and a missing variable, on forked ranks") {
  const auto unknown = run_ranks(
      2, [](const Rank&) { start(milliseconds(500)); },
      with({{"MASTER_ADDR", "no-such-host.invalid"}}));
  const auto missing = run_ranks(
      2, [](const Rank&) { start(milliseconds(500)); }, with({{"MASTER_PORT", ""}}));
  INFO(summary(unknown) << summary(missing));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(unknown[rank].error_type == "UsageError");
    CHECK_THAT(unknown[rank].error, contains("the host \"no-such-host.invalid\" has no address"));
    CHECK(missing[rank].error_type == "UsageError");
    CHECK_THAT(missing[rank].error, contains("MASTER_PORT is not set"));
  }
}

TEST_CASE("two processes with one rank") {
  // The environment names rank 1 twice; the second to come is refused, and rank 0 names rank 2.
  const auto results = run_ranks(3, [](const Rank& rank) {
    if (rank.rank() == 2) {
      setenv("RANK", "1", 1);
    }
    start(milliseconds(1500));
  });
  INFO(summary(results));
  CHECK_THAT(results[0].error, contains("rank 2 of 3 did not come"));
  const auto& refused = results[1].error_type == "UsageError" ? results[1] : results[2];
  CHECK_THAT(refused.error, contains("another process has joined the store at 127.0.0.1:"));
  CHECK_THAT(refused.error, contains("as rank 1"));
}

TEST_CASE("after a failed start the next one works") {
  int failed[2];
  REQUIRE(pipe(failed) == 0);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    char word = 0;
    if (rank.rank() == 0) {
      try {
        start(milliseconds(500));
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
      RANK_CHECK(write(failed[1], &word, 1) == 1);
    } else {
      RANK_CHECK(read(failed[0], &word, 1) == 1);
    }
    start(milliseconds(15000));
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  close(failed[0]);
  close(failed[1]);
  INFO(summary(results));
  CHECK_THAT(results[0]["error"], contains("rank 1 of 2 did not come"));
  CHECK(results[0]["sum"] == "3.000000");
  CHECK(results[1]["sum"] == "3.000000");
}

TEST_CASE("a start that failed for a missing peer closes its sockets and threads") {
  const auto results = run_ranks(1, [](const Rank& rank) {
    setenv("WORLD_SIZE", "2", 1);
    const auto sockets = open_sockets();
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        start(milliseconds(300));
      } catch (const ddp::CommunicationError& error) {
        rank.report("error" + std::to_string(attempt), error.what());
      }
    }
    rank.report("threads", threads());
    rank.report("sockets", static_cast<int>(open_sockets()) - static_cast<int>(sockets));
    setenv("WORLD_SIZE", "1", 1);
    start(milliseconds(5000));
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK_THAT(results[0]["error0"], contains("rank 1 of 2 did not come"));
  CHECK_THAT(results[0]["error1"], contains("rank 1 of 2 did not come"));
  CHECK(results[0]["threads"] == "1");
  CHECK(results[0]["sockets"] == "0");
  CHECK(results[0]["sum"] == "1.000000");
}

TEST_CASE("a rank 0 that is stopped during the start") {
  pid_t stopped = 0;
  const ddp::test::Trigger stop{0, "stop", [&](int pid) {
                                  stopped = pid;
                                  kill(pid, SIGSTOP);
                                }};
  const ddp::test::Trigger ended{1, "ended", [&](int) { kill(stopped, SIGKILL); }};
  const auto results =
      run_ranks(2,
                [](const Rank& rank) {
                  if (rank.rank() == 0) {
                    // As a store that was stopped while it opened: it listens, and does not answer.
                    RANK_CHECK(listen(std::atoi(std::getenv("DDP_MASTER_LISTEN_FD")), 8) == 0);
                    rank.report("stop", "now");
                    pause();
                  }
                  try {
                    start(milliseconds(1500));
                  } catch (const ddp::CommunicationError&) {
                    rank.report("ended", 1);
                    throw;
                  }
                },
                with({}), {stop, ended});
  INFO(summary(results));
  CHECK(results[0].status == 128 + SIGKILL);
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error, contains("127.0.0.1:"));
  CHECK_THAT(results[1].error, contains("rank 0"));
  CHECK(results[1].seconds < 5);
}

TEST_CASE("a reserved socket that is no number is an error that names the variable") {
  const auto results = run_ranks(1, [](const Rank&) {
    setenv("DDP_MASTER_LISTEN_FD", "abc", 1);
    start(milliseconds(5000));
  });
  INFO(summary(results));
  CHECK(results[0].error_type == "UsageError");
  CHECK_THAT(results[0].error, contains("DDP_MASTER_LISTEN_FD is \"abc\""));
  CHECK_THAT(results[0].error,
             contains("expected the number of a socket that the launcher has opened"));
}

TEST_CASE("a rank 0 that is killed while it waits for the others") {
  pid_t master = 0;
  const ddp::test::Trigger begins{0, "begins", [&](int pid) { master = pid; }};
  const ddp::test::Trigger joined{2, "joined", [&](int) { kill(master, SIGKILL); }};
  const auto results = run_ranks(
      3,
      [](const Rank& rank) {
        if (rank.rank() == 2) {
          c10d::TCPStoreOptions options;
          options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
          options.waitWorkers = false;
          c10d::TCPStore store("127.0.0.1", options);
          store.wait({"ddp/joined/1"}, milliseconds(15000));
          rank.report("joined", 1);
          return;
        }
        if (rank.rank() == 0) {
          rank.report("begins", 1);
        }
        start(milliseconds(4000));
      },
      with({}), {begins, joined});
  INFO(summary(results));
  CHECK(results[0].status == 128 + SIGKILL);
  CHECK(results[1].error_type == "CommunicationError");
  // The second where rank 1 had not come to wait yet.
  CHECK_THAT(results[1].error,
             contains("rank 0 has ended, or does not answer, at its store at 127.0.0.1:") ||
                 contains("could not be joined within 4.0 s"));
}

TEST_CASE("init, destroy and init again on one port, many times") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    for (int round = 0; round < 6; ++round) {
      start(milliseconds(15000));
      rank.report("sum" + std::to_string(round), sum_of_ranks());
      ddp::destroy_process_group();
    }
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["sum5"] == "6.000000");
  }
}

TEST_CASE("a second init is refused, and the group stays") {
  const auto results = run_ranks(1, [](const Rank& rank) {
    start(milliseconds(5000));
    try {
      start(milliseconds(5000));
    } catch (const ddp::UsageError& error) {
      rank.report("error", error.what());
    }
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK_THAT(results[0]["error"], contains("exists already; call destroy_process_group() first"));
  CHECK(results[0]["sum"] == "1.000000");
}

TEST_CASE("C28: a machine whose own name has no address") {
  if (getuid() != 0) {
    WARN("needs root: skipped");
    return;
  }
  const auto rename = [] {
    RANK_CHECK(unshare(CLONE_NEWUTS) == 0);
    RANK_CHECK(sethostname("bogus-host-xyz", 14) == 0);
  };
  const auto loopback = run_ranks(2, [&](const Rank& rank) {
    rename();
    start(milliseconds(10000));
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  });
  const auto by_name = run_ranks(
      2,
      [&](const Rank&) {
        rename();
        start(milliseconds(600));
      },
      with({{"MASTER_ADDR", "bogus-host-xyz"}}));
  INFO(summary(loopback) << summary(by_name));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(loopback[rank].status == 0);
    CHECK(loopback[rank]["sum"] == "3.000000");
    CHECK(by_name[rank].error_type == "UsageError");
    CHECK_THAT(by_name[rank].error, contains("the host \"bogus-host-xyz\" has no address"));
    CHECK(by_name[rank].seconds < 6);
  }
}

TEST_CASE("interfaces chosen by GLOO_SOCKET_IFNAME") {
  const auto sum = [](const Rank& rank) {
    start(milliseconds(10000));
    rank.report("sum", sum_of_ranks());
    ddp::destroy_process_group();
  };
  const auto one = run_ranks(2, sum, with({{"GLOO_SOCKET_IFNAME", "lo"}}));
  const auto several = run_ranks(2, sum, with({{"GLOO_SOCKET_IFNAME", "lo,lo"}}));
  const auto unknown = run_ranks(2, sum, with({{"GLOO_SOCKET_IFNAME", "lo,nope0"}}));
  INFO(summary(one) << summary(several) << summary(unknown));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(one[rank]["sum"] == "3.000000");
    CHECK(several[rank]["sum"] == "3.000000");
    CHECK(unknown[rank].error_type == "UsageError");
    CHECK_THAT(unknown[rank].error,
               contains("Gloo cannot use the interface \"nope0\" of GLOO_SOCKET_IFNAME=lo,nope0"));
    CHECK_THAT(unknown[rank].error, contains("`ip addr`"));
  }
}
