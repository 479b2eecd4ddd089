#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/resource.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/ddp.h>
#include <ddp/process_group/gloo_backend.h>

// Which backend a group gets, and what is said about it.

using ddp::InitProcessGroupOptions;
using ddp::NewGroupOptions;
using ddp::test::Rank;
using ddp::test::RankOptions;
using ddp::test::RankResult;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

void start(const std::string& backend) {
  ddp::init_process_group(InitProcessGroupOptions(backend).timeout(std::chrono::seconds(20)));
}

/// What `act` writes to the process's standard error.
std::string said(const std::function<void()>& act) {
  FILE* const file = std::tmpfile();
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  const auto end = [&] {
    std::fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
  };
  try {
    act();
  } catch (...) {
    end();
    std::fclose(file);
    throw;
  }
  end();
  std::rewind(file);
  std::string text;
  char chunk[4096];
  while (std::fgets(chunk, sizeof(chunk), file) != nullptr) {
    // LibTorch's own warnings begin with "[W".
    text += std::string(chunk).rfind("ddp: ", 0) == 0 ? chunk : "";
  }
  std::fclose(file);
  return text;
}

/// From now on this process gets no memory file of more than 4 KB: shared memory is full.
void fill_shared_memory() {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = 4096;
  setrlimit(RLIMIT_FSIZE, &limit);
}

/// Starts over `backend`, and reports what it got, what it said, and a sum.
void join(const Rank& rank, const std::string& backend) {
  rank.report("said", said([&] { start(backend); }));
  rank.report("backend", ddp::get_backend());
  const auto tensor = at::ones({5000});
  ddp::all_reduce(tensor);
  rank.report("sum", tensor[4999].item<float>());
  ddp::destroy_process_group();
}

void check_all(const std::vector<RankResult>& results, const std::string& backend) {
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["backend"] == backend);
    CHECK(result["sum"] == std::to_string(static_cast<float>(results.size())));
  }
}

RankOptions with(const std::string& name, const std::string& value) {
  RankOptions options;
  options.environment[name] = value;
  return options;
}

}  // namespace

TEST_CASE("no backend is shared memory on one machine; Gloo, without a word, where that is asked") {
  const auto by_itself = run_ranks(3, [](const Rank& rank) { join(rank, ""); });
  INFO(summary(by_itself));
  check_all(by_itself, "shm");
  const auto switched_off = run_ranks(
      3, [](const Rank& rank) { join(rank, ""); }, with("DDP_SHM", "0"));
  INFO(summary(switched_off));
  check_all(switched_off, "gloo");
  const auto lazy = run_ranks(
      2, [](const Rank& rank) { join(rank, ""); }, with("TORCH_GLOO_LAZY_INIT", "1"));
  INFO(summary(lazy));
  check_all(lazy, "gloo");
  const auto asked = run_ranks(2, [](const Rank& rank) { join(rank, "gloo"); });
  INFO(summary(asked));
  check_all(asked, "gloo");
  const auto one_asks =
      run_ranks(3, [](const Rank& rank) { join(rank, rank.rank() == 1 ? "gloo" : ""); });
  INFO(summary(one_asks));
  check_all(one_asks, "gloo");
  const auto alone = run_ranks(1, [](const Rank& rank) { join(rank, ""); });
  INFO(summary(alone));
  check_all(alone, "gloo");
  for (const auto& results : {by_itself, switched_off, lazy, asked, one_asks, alone}) {
    for (const auto& result : results) {
      CHECK(result["said"].empty());
    }
  }
}

TEST_CASE("one rank alone may ask for shared memory, too") {
  const auto results = run_ranks(1, [](const Rank& rank) { join(rank, "shm"); });
  INFO(summary(results));
  check_all(results, "shm");
}

TEST_CASE("where a rank has no room, all take Gloo, and rank 0 says why in one line") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    if (rank.rank() == 1) {
      fill_shared_memory();
    }
    join(rank, "");
  });
  INFO(summary(results));
  check_all(results, "gloo");
  CHECK_THAT(results[0]["said"],
             contains("ddp: rank 0: the ranks of this machine do not share memory, and communicate "
                      "over Gloo: rank 1: there is no room for ") &&
                 contains(" bytes of shared memory (File too large)\n"));
  CHECK(results[0]["said"].find('\n') == results[0]["said"].size() - 1);
  CHECK(results[1]["said"].empty());
  CHECK(results[2]["said"].empty());
}

TEST_CASE("shared memory that was asked for and cannot be is an error on every rank") {
  const auto full = run_ranks(2, [](const Rank& rank) {
    if (rank.rank() == 1) {
      fill_shared_memory();
    }
    join(rank, "shm");
  });
  INFO(summary(full));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(full[rank].error_type == "UsageError");
    CHECK_THAT(full[rank].error, contains("rank " + std::to_string(rank) +
                                          ": the backend \"shm\" cannot be used: ") &&
                                     contains("rank 1: there is no room for ") &&
                                     contains("Leave the backend out (\"\"), and Gloo is taken"));
  }
  const auto lazy = run_ranks(
      2, [](const Rank& rank) { join(rank, "shm"); }, with("TORCH_GLOO_LAZY_INIT", "1"));
  INFO(summary(lazy));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(lazy[rank].error_type == "UsageError");
    CHECK_THAT(lazy[rank].error,
               contains("rank " + std::to_string(rank) + ": TORCH_GLOO_LAZY_INIT is set"));
  }
  const auto one_asks =
      run_ranks(2, [](const Rank& rank) { join(rank, rank.rank() == 1 ? "shm" : "gloo"); });
  INFO(summary(one_asks));
  CHECK(one_asks[1].error_type == "UsageError");
  CHECK_THAT(one_asks[1].error, contains("cannot be used: rank 0 takes Gloo."));
  CHECK(one_asks[0].error_type == "CommunicationError");
  CHECK_THAT(one_asks[0].error,
             contains("rank 0: the group was not made: rank 1: the backend \"shm\" cannot be used: "
                      "rank 0 takes Gloo."));
}

TEST_CASE("a refusal that all share is heard of before the store goes") {
  // Reads what the others have announced when their processes are gone, or after a while.
  class LateStore final : public c10d::PrefixStore {
   public:
    LateStore(const c10::intrusive_ptr<c10d::Store>& store, std::function<bool()> others_left)
        : PrefixStore("late", store), others_left_(std::move(others_left)) {}
    c10::intrusive_ptr<c10d::Store> clone() override {
      return c10::make_intrusive<LateStore>(store_->clone(), others_left_);
    }
    void wait(const std::vector<std::string>& keys,
              const std::chrono::milliseconds& timeout) override {
      if (keys.front().find("ddp/member/0") != std::string::npos) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
        while (!others_left_() && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      }
      PrefixStore::wait(keys, timeout);
    }

   private:
    const std::function<bool()> others_left_;
  };

  const ddp::test::ReservedPort port;
  int left[2];
  REQUIRE(pipe2(left, O_NONBLOCK) == 0);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port.port());
    options.isServer = rank.rank() == 0;
    options.waitWorkers = false;
    c10::intrusive_ptr<c10d::Store> store =
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    if (rank.rank() == 0) {
      store = c10::make_intrusive<c10d::PrefixStore>("late", store);
    } else {
      fill_shared_memory();
      close(left[1]);
      store = c10::make_intrusive<LateStore>(store, [fd = left[0]] {
        char letter = 0;
        return read(fd, &letter, 1) == 1;
      });
    }
    try {
      ddp::init_process_group(InitProcessGroupOptions("shm")
                                  .store(std::move(store))
                                  .rank(rank.rank())
                                  .world_size(2)
                                  .timeout(std::chrono::seconds(20)));
    } catch (const ddp::UsageError&) {
      store.reset();
      RANK_CHECK(write(left[1], "x", 1) == 1 || rank.rank() == 1);
      throw;
    }
  });
  close(left[0]);
  close(left[1]);
  INFO(summary(results));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(results[rank].error_type == "UsageError");
    CHECK_THAT(results[rank].error, contains("the backend \"shm\" cannot be used: rank 1: "));
  }
}

TEST_CASE("a new group gets what the default one asked for, or its own") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start("");
    const auto pair = ddp::new_group({0, 2});
    const auto gloo = ddp::new_group({1, 2}, NewGroupOptions().backend("gloo"));
    const auto alone = ddp::new_group({1});
    const auto own = ddp::new_group({0, 1}, NewGroupOptions().backend("shm"));
    std::string names;
    for (const auto& group : {pair, gloo, alone, own}) {
      if (ddp::is_member(group)) {
        names += ddp::get_backend(group) + " ";
        const auto tensor = at::ones({100000});
        ddp::all_reduce(tensor, {}, group);
        RANK_CHECK(tensor[99999].item<float>() == static_cast<float>(ddp::get_world_size(group)));
      }
    }
    rank.report("names", names);
    ddp::destroy_process_group();
    start("gloo");
    rank.report("after gloo", ddp::get_backend(ddp::new_group({0, 1, 2})));
    std::string refusal;
    try {
      ddp::new_group({0, 1}, NewGroupOptions().backend("mpi"));
    } catch (const ddp::UsageError& error) {
      refusal = error.what();
    }
    rank.report("refusal", refusal);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  const char* const kNames[] = {"shm shm ", "gloo gloo shm ", "shm gloo "};
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(results[rank].status == 0);
    CHECK(results[rank]["names"] == kNames[rank]);
    CHECK(results[rank]["after gloo"] == "gloo");
    CHECK_THAT(
        results[rank]["refusal"],
        contains("new_group: the backend \"mpi\" is unknown; use \"gloo\", \"shm\", \"nccl\", "
                 "\"cpu:gloo,cuda:nccl\", or \"\" for what the default group asked for"));
  }
}

TEST_CASE("beside a rank of c10d's own the group takes Gloo, without a word, and waits for none") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    if (rank.rank() == 0) {
      join(rank, "");
      return;
    }
    // As Python's ranks do.
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
    options.timeout = std::chrono::seconds(15);
    options.numWorkers = 2;
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        "default_pg", c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options));
    ddp::detail::GlooSettings settings;
    settings.rank = 1;
    settings.world_size = 2;
    settings.devices = ddp::detail::make_gloo_devices(1, "127.0.0.1");
    settings.connect_timeout = settings.timeout = std::chrono::seconds(15);
    settings.name = "0";
    const auto backend = ddp::detail::make_gloo_backend(
        c10::make_intrusive<c10d::PrefixStore>("0//cpu/", store), settings);
    std::vector<at::Tensor> tensors{at::ones({5000})};
    backend->allreduce(tensors)->wait();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["backend"] == "gloo");
  CHECK(results[0]["sum"] == "2.000000");
  CHECK(results[0]["said"].empty());
  CHECK(results[0].seconds < 15);
}
