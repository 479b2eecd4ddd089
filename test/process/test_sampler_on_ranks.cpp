#include <set>
#include <test/support/catch2.h>
#include <test/support/ranks.h>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>

#include <ddp/ddp.h>

using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

/// The items 0 to 7.
struct Items : torch::data::datasets::Dataset<Items> {
  torch::data::Example<> get(std::size_t index) override {
    return {torch::tensor({static_cast<std::int64_t>(index)}), torch::tensor({0})};
  }
  std::optional<std::size_t> size() const override { return 8; }
};

}  // namespace

TEST_CASE("DistributedSampler takes its rank from the default group") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    ddp::DistributedSampler early(8);
    RANK_CHECK(early.size() == 8);
    ddp::init_process_group();
    ddp::DistributedSampler sampler(8);
    RANK_CHECK(sampler.options().rank() == rank.rank());
    RANK_CHECK(sampler.options().num_replicas() == 2);
    RANK_CHECK(sampler.size() == 4);
    try {
      early.reset();
    } catch (const ddp::UsageError& error) {
      rank.report("early", std::string(error.what()));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["early"], contains("before ddp::init_process_group()"));
  }
}

TEST_CASE(
    "C17: through the loader, ranks share each epoch's items, and every epoch has another order") {
  std::vector<std::string> runs;
  for (int run = 0; run < 2; ++run) {
    const auto results = run_ranks(2, [](const Rank& rank) {
      ddp::init_process_group();
      auto dataset = Items().map(torch::data::transforms::Stack<>());
      ddp::DistributedSampler sampler(dataset.size().value());
      auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 4);
      for (int epoch = 0; epoch < 3; ++epoch) {
        sampler.set_epoch(epoch);
        std::string seen;
        for (const auto& batch : *loader) {
          for (std::int64_t i = 0; i < batch.data.numel(); ++i) {
            seen += std::to_string(batch.data.view(-1)[i].item<std::int64_t>());
          }
        }
        rank.report("epoch " + std::to_string(epoch), seen);
      }
      ddp::destroy_process_group();
    });
    INFO(summary(results));
    std::set<std::string> orders;
    std::string all;
    for (int epoch = 0; epoch < 3; ++epoch) {
      const auto name = "epoch " + std::to_string(epoch);
      REQUIRE(results[0].status == 0);
      REQUIRE(results[1].status == 0);
      const auto both = results[0][name] + results[1][name];
      CHECK(both.size() == 8);
      CHECK(std::set<char>(both.begin(), both.end()).size() == 8);
      orders.insert(both);
      all += both;
    }
    CHECK(orders.size() >= 2);
    runs.push_back(all);
  }
  CHECK(runs[0] == runs[1]);
}
