#include <csignal>
#include <filesystem>
#include <functional>
#include <test/process/models.h>
#include <test/support/catch2.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

// Faults in moments that no signal from outside can choose: between two words of the ranks over the
// store, or between two collectives.

using ddp::test::Rank;
using ddp::test::RankResult;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::scalar_layer;
using ddp::test::summary;

namespace {

/// Work that says that it was aborted, as c10d's interface allows; Gloo's throws instead.
struct AbortedWork : c10d::Work {
  static c10::intrusive_ptr<c10d::Work> make() { return c10::make_intrusive<AbortedWork>(); }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return false; }
};

/// A process group of the program's own: the default group's connections, and a rank that is killed
/// when it begins to broadcast its values, or collectives that are aborted.
class OwnGroup final : public c10d::ProcessGroup {
 public:
  OwnGroup()
      : ProcessGroup(
            c10::make_intrusive<c10d::PrefixStore>("own", ddp::default_group()->getStore()),
            ddp::get_rank(), ddp::get_world_size()) {
    setDefaultBackend(BackendType::GLOO);
    setBackend(c10::DeviceType::CPU, BackendType::GLOO,
               ddp::default_group()->getBackend(c10::DeviceType::CPU));
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    if (kills_at_broadcast && options.rootRank == getRank()) {
      raise(SIGKILL);
    }
    return ProcessGroup::broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return aborts ? AbortedWork::make() : ProcessGroup::allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return aborts ? AbortedWork::make() : ProcessGroup::allgather(outputs, inputs, options);
  }

  bool kills_at_broadcast = false;  // of this rank's values
  bool aborts = false;
};

/// Runs two ranks that meet over a file, so that the store outlives each of them.
std::vector<RankResult> run_over_file(const std::function<void(const Rank&)>& body) {
  char folder[] = "/tmp/ddp_test_XXXXXX";
  const std::string path = mkdtemp(folder);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    ddp::init_process_group(ddp::InitProcessGroupOptions(ddp::test::backend())
                                .init_method("file://" + path + "/meet")
                                .rank(rank.rank())
                                .world_size(rank.world_size())
                                .timeout(std::chrono::seconds(20)));
    body(rank);
    ddp::destroy_process_group();
  });
  std::filesystem::remove_all(path);
  return results;
}

ddp::DistributedDataParallelOptions over(const c10::intrusive_ptr<OwnGroup>& group) {
  return ddp::DistributedDataParallelOptions().process_group(group);
}

/// A store where reading a key of one kind fails: `why` is the error. (A network that lets the
/// ranks reach the store but not each other; a store that dies in one certain moment.)
class FailingStore final : public c10d::FileStore {
 public:
  FailingStore(std::string path, std::string kind, std::string why)
      : FileStore(path, kMany),
        path_(std::move(path)),
        kind_(std::move(kind)),
        why_(std::move(why)) {}
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<FailingStore>(path_, kind_, why_);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    if (key.find(kind_) != std::string::npos) {
      throw std::runtime_error(why_);
    }
    return FileStore::get(key);
  }

 private:
  /// The file stays until the test removes it: the last of so many workers would.
  static constexpr int kMany = 1000;
  const std::string path_;
  const std::string kind_;
  const std::string why_;
};

}  // namespace

TEST_CASE("rank 0 is killed when it begins to give its parameters to the others") {
  const auto results = run_over_file([](const Rank& rank) {
    const auto group = c10::make_intrusive<OwnGroup>();
    group->kills_at_broadcast = rank.rank() == 0;
    const ddp::DistributedDataParallel model(scalar_layer(), over(group));
  });
  INFO(summary(results));
  CHECK(results[0].status == 128 + SIGKILL);
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error, contains("rank 1") && contains("giving rank 0's parameters and "
                                                              "buffers to all ranks failed"));
  CHECK(results[1].seconds < 15);  // not the group's timeout
}

TEST_CASE("join: the last rank is killed when it begins to give its parameters to the others") {
  const auto results = run_over_file([](const Rank& rank) {
    const auto group = c10::make_intrusive<OwnGroup>();
    ddp::DistributedDataParallel model(scalar_layer(), over(group));
    group->kills_at_broadcast = rank.rank() == 1;
    model->join([&] {
      for (int step = 0; step <= rank.rank(); ++step) {
        model(scalar_input(rank)).sum().backward();
      }
    });
  });
  INFO(summary(results));
  CHECK(results[1].status == 128 + SIGKILL);
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error, contains("rank 0") && contains("giving the last rank's parameters "
                                                              "and buffers to all ranks failed"));
  CHECK(results[0].seconds < 15);
}

TEST_CASE("a backend whose work says that it was aborted") {
  for (const bool has_hook : {false, true}) {
    const auto results = run_over_file([has_hook](const Rank& rank) {
      const auto group = c10::make_intrusive<OwnGroup>();
      ddp::DistributedDataParallel model(scalar_layer(), over(group));
      if (has_hook) {
        model->register_comm_hook(ddp::comm_hooks::quantization_per_tensor(group));
      }
      const auto loss = model(scalar_input(rank)).sum();
      group->aborts = true;
      loss.backward();
    });
    INFO(summary(results));
    for (const auto& result : results) {
      CHECK(result.error_type == "CommunicationError");
      CHECK_THAT(result.error,
                 contains(has_hook ? "the communication hook for bucket 0"
                                   : "the all-reduce of bucket 0") &&
                     contains(has_hook ? "a collective was aborted" : "failed: it was aborted"));
    }
  }
}

TEST_CASE("ranks that reach the store but not each other, or the store no longer") {
  struct Case {
    std::string backend;
    std::string keys;
    std::string why;
    std::string text;
  };
  const Case cases[] = {
      {"gloo", "/cpu/", "connect: No route to host",
       "could not connect to the other ranks over Gloo from 127.0.0.1"},
      {"gloo", "/cpu/", "Connection closed by peer",
       "a rank left while the ranks of the group \"0\" were connecting"},
      {"", "ddp/member/", "the disk is broken", "cannot learn what rank 0 has announced"}};
  for (const auto& one : cases) {
    char folder[] = "/tmp/ddp_test_XXXXXX";
    const std::string path = mkdtemp(folder);
    const auto results = run_ranks(2, [&](const Rank& rank) {
      ddp::init_process_group(
          ddp::InitProcessGroupOptions(one.backend)
              .store(c10::make_intrusive<FailingStore>(path + "/meet", one.keys, one.why))
              .rank(rank.rank())
              .world_size(rank.world_size())
              .timeout(std::chrono::seconds(20)));
    });
    std::filesystem::remove_all(path);
    INFO(summary(results));
    for (const auto& result : results) {
      CHECK(result.error_type == "CommunicationError");
      CHECK_THAT(result.error, contains(one.text) && contains(one.why));
    }
  }
}
