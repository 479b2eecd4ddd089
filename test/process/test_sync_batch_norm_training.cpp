#include <test/process/models.h>
#include <test/support/catch2.h>

// SyncBatchNorm under DistributedDataParallel: its collectives and the buckets' share one group.

using ddp::SyncBatchNorm;
using ddp::test::bits_of_all;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::start;
using ddp::test::summary;

namespace {

struct NormFactory {
  bool synchronized;
  void add(torch::nn::Sequential& net, std::int64_t features) const {
    if (synchronized) {
      net->push_back(SyncBatchNorm(features));
    } else {
      net->push_back(torch::nn::BatchNorm2d(features));
    }
  }
};

/// Four layers with norms between, of parameters of very different sizes.
torch::nn::Sequential make_net(const NormFactory& norm, at::ScalarType dtype) {
  torch::manual_seed(7);
  torch::nn::Sequential net;
  std::int64_t channels = 2;
  for (const std::int64_t next : {5, 9, 3}) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, next, 3).padding(1)));
    norm.add(net, next);
    net->push_back(torch::nn::ReLU());
    channels = next;
  }
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(channels * 16, 4));
  net->to(dtype);
  return net;
}

double distance(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double largest = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    largest = std::max(largest, (left[i] - right[i]).abs().max().item<double>());
  }
  return largest;
}

}  // namespace

TEST_CASE("trains as one process with the full batch, and all ranks have the same bits") {
  const int world_size = GENERATE(2, 3);
  // A bucket for each parameter, or one for all.
  const bool tiny_buckets = GENERATE(true, false);
  const auto results = run_ranks(world_size, [&](const Rank& rank) {
    start();
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      auto net = make_net({true}, dtype);
      auto reference = make_net({false}, dtype);
      ddp::DistributedDataParallel model(net, ddp::DistributedDataParallelOptions()
                                                  .bucket_cap_mb(tiny_buckets ? 1e-6 : 25)
                                                  .broadcast_buffers(tiny_buckets));
      torch::optim::SGD optimizer(model->parameters(),
                                  torch::optim::SGDOptions(0.05).momentum(0.9));
      torch::optim::SGD other(reference->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9));
      torch::manual_seed(23);
      for (int step = 0; step < 4; ++step) {
        const auto rows = at::randn({2 * world_size, 2, 4, 4}, dtype);
        const auto targets = at::randn({2 * world_size, 4}, dtype);
        optimizer.zero_grad();
        other.zero_grad();
        at::mse_loss(model->forward(own_rows(rows, rank)), own_rows(targets, rank)).backward();
        at::mse_loss(reference->forward(rows), targets).backward();
        optimizer.step();
        other.step();
        const double tolerance = dtype == at::kDouble ? 1e-10 : 1e-4;
        RANK_CHECK(distance(net->parameters(), reference->parameters()) < tolerance);
        RANK_CHECK(distance(net->buffers(), reference->buffers()) < tolerance);
      }
      rank.report(dtype == at::kDouble ? "double" : "float",
                  bits_of_all(net->parameters()) + bits_of_all(net->buffers()));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    REQUIRE(result.status == 0);
    CHECK(result["double"] == results[0]["double"]);
    CHECK(result["float"] == results[0]["float"]);
  }
}

TEST_CASE("an empty batch on one rank: it takes part in everything, the average is right") {
  const int empty = GENERATE(0, 2);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start();
    auto net = make_net({true}, at::kDouble);
    auto reference = make_net({false}, at::kDouble);
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    torch::manual_seed(29);
    for (int step = 0; step < 3; ++step) {
      const auto rows = at::randn({6, 2, 4, 4}, at::kDouble);
      std::vector<std::int64_t> split{3, 3, 3};
      split[empty] = 0;
      net->zero_grad();
      reference->zero_grad();
      const auto output = model->forward(rows.split_with_sizes(split)[rank.rank()].clone());
      output.square().sum().mul(3).backward();  // DistributedDataParallel averages
      reference->forward(rows).square().sum().backward();
      const auto mine = net->parameters();
      const auto theirs = reference->parameters();
      for (std::size_t i = 0; i < mine.size(); ++i) {
        RANK_CHECK(at::allclose(mine[i].grad(), theirs[i].grad(), 1e-8, 1e-8));
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}
