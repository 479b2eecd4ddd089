#include <cstdlib>
#include <test/process/models.h>
#include <test/support/catch2.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/process_group/gloo_backend.h>

// A job with a rank that speaks c10d's wire and no more, as Python's ranks do. (Python itself
// stands there in the parity tests.)

using ddp::test::four_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

/// The backend of rank 1 as c10d makes it: no word of this library's on the store.
c10::intrusive_ptr<c10d::Backend> plain_c10d_backend(const Rank& rank) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  options.timeout = std::chrono::seconds(15);
  options.numWorkers = rank.world_size();
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      "default_pg", c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options));
  ddp::detail::GlooSettings settings;
  settings.rank = rank.rank();
  settings.world_size = rank.world_size();
  settings.devices = ddp::detail::make_gloo_devices(rank.rank(), "127.0.0.1");
  settings.connect_timeout = settings.timeout = std::chrono::seconds(15);
  settings.name = "0";
  return ddp::detail::make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("0//cpu/", store),
                                        settings);
}

}  // namespace

TEST_CASE("beside a rank that is not from this library, what would not match is refused") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    if (rank.rank() == 1) {
      plain_c10d_backend(rank)->barrier()->wait();
      return;
    }
    ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(std::chrono::seconds(15)));
    const auto refusal = [](const auto& act) -> std::string {
      try {
        act();
      } catch (const ddp::UsageError& error) {
        return error.what();
      }
      return "";
    };
    rank.report("wrap",
                refusal([] { ddp::DistributedDataParallel model(torch::nn::Linear(2, 2)); }));
    rank.report("normalize", refusal([] {
                  ddp::SyncBatchNorm layer(2);
                  layer->forward(four_rows());
                }));
    ddp::barrier();
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK_THAT(results[0]["wrap"],
             contains("rank 1 of the group is not from this library: with Python's "
                      "DistributedDataParallel there") &&
                 contains("python_compatible(true)"));
  CHECK_THAT(results[0]["normalize"],
             contains("the group has ranks that are no C++ ranks of this library, and Python's "
                      "SyncBatchNorm sends something else"));
}
