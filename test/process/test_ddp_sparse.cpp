#include <test/process/models.h>
#include <test/support/catch2.h>

// DistributedDataParallel on forked ranks over Gloo: sparse gradients.

using ddp::test::bits;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;

namespace {

/// A sparse embedding with padding, and a dense layer above it.
struct SparseImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module(
      "embedding",
      torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true).padding_idx(0)));
  torch::nn::Linear linear =
      register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
  at::Tensor forward(const at::Tensor& indices) { return linear(embedding(indices)); }
};
TORCH_MODULE(Sparse);

at::Tensor indices(std::vector<std::int64_t> values) { return at::tensor(values, at::kLong); }

}  // namespace

TEST_CASE("C05: sparse gradients, also where a rank looks up nothing but the padding") {
  for (const int padded : {0, 1, 2}) {  // 2: both
    const auto results = run_ranks(2, [padded](const Rank& rank) {
      start();
      torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true).padding_idx(0));
      ddp::DistributedDataParallel model(net);
      const bool is_padded = padded == 2 || rank.rank() == padded;
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(
            indices(is_padded ? std::vector<std::int64_t>{0, 0} : std::vector<std::int64_t>{1, 2}))
            .sum()
            .backward();
        RANK_CHECK(net->weight.grad().is_sparse());
        const auto row = padded == 2 ? 0.0F : 0.5F;
        RANK_CHECK(
            at::equal(net->weight.grad().to_dense(),
                      at::tensor({0.0F, 0.0F, row, row, row, row, 0.0F, 0.0F}).view({4, 2})));
      }
      ddp::destroy_process_group();
    });
    INFO("padded: " << padded << summary(results));
    CHECK(results[0].status == 0);
    CHECK(results[1].status == 0);
  }
}

TEST_CASE(
    "sparse and dense gradients in one model: as one process over all rows, at 2 and 3 ranks") {
  for (const int ranks : {2, 3}) {
    const auto results = run_ranks(ranks, [](const Rank& rank) {
      start();
      torch::manual_seed(3);
      Sparse net;
      Sparse alone;
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        set_values(alone->parameters()[i], net->parameters()[i]);
      }
      ddp::DistributedDataParallel model(net,
                                         ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      torch::optim::SGD reference(alone->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        // Another number of different rows on each rank and in each step.
        std::vector<std::int64_t> all;
        std::vector<std::int64_t> own;
        for (int r = 0; r < rank.world_size(); ++r) {
          for (int i = 0; i < 6; ++i) {
            all.push_back(i <= (r + step) % 3 + 1 ? i % 4 : 0);
            if (r == rank.rank()) {
              own.push_back(all.back());
            }
          }
        }
        optimizer.zero_grad();
        reference.zero_grad();
        model(indices(own)).pow(2).mean().backward();
        alone->forward(indices(all)).pow(2).mean().backward();
        RANK_CHECK(net->embedding->weight.grad().is_sparse());
        RANK_CHECK(at::allclose(net->embedding->weight.grad().to_dense(),
                                alone->embedding->weight.grad().to_dense(), 0, 1e-7));
        optimizer.step();
        reference.step();
      }
      RANK_CHECK(at::allclose(net->linear->weight, alone->linear->weight, 0, 1e-6));
      rank.report("weights", bits(net->embedding->weight) + bits(net->linear->weight));
      ddp::destroy_process_group();
    });
    INFO(summary(results));
    for (const auto& result : results) {
      CHECK(result.status == 0);
      CHECK(result["weights"] == results[0]["weights"]);
    }
  }
}

TEST_CASE("a sparse embedding that some ranks or none use, with the search on") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Sparse net;
    set_values(net->linear->weight, at::ones({1, 2}));
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(true));
    const auto pass = [&](bool looks_up) {
      net->zero_grad();
      auto loss = net->linear(at::ones({1, 2})).sum();
      model(indices({1}));  // what this gives is not used
      if (looks_up) {
        loss = loss + model(indices({1})).sum();
      }
      loss.backward();
    };
    pass(rank.rank() == 1);
    RANK_CHECK(
        at::equal(net->embedding->weight.grad().to_dense(),
                  at::tensor({0.0F, 0.0F, 0.5F, 0.5F, 0.0F, 0.0F, 0.0F, 0.0F}).view({4, 2})));
    pass(false);
    RANK_CHECK(!net->embedding->weight.grad().defined());
    pass(true);
    RANK_CHECK(net->embedding->weight.grad().to_dense().sum().item<float>() == 2.0F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("a sparse gradient that no layer announced becomes dense; a tied weight's stays sparse") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct FunctionalImpl : torch::nn::Module {
      at::Tensor table = register_parameter("table", at::ones({3, 2}));
      at::Tensor forward(const at::Tensor& rows) {
        return at::embedding(table, rows, -1, false, /*sparse=*/true);
      }
    };
    const auto functional = std::make_shared<FunctionalImpl>();
    ddp::DistributedDataParallel model(functional);
    model(indices({rank.rank()})).sum().backward();
    RANK_CHECK(!functional->table.grad().is_sparse());
    RANK_CHECK(at::equal(functional->table.grad(),
                         at::tensor({0.5F, 0.5F, 0.5F, 0.5F, 0.0F, 0.0F}).view({3, 2})));

    struct TiedImpl : torch::nn::Module {
      torch::nn::Embedding embedding = register_module(
          "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(3, 2).sparse(true)));
      at::Tensor forward(const at::Tensor& rows) {
        return at::linear(embedding(rows), embedding->weight);
      }
    };
    const auto tied = std::make_shared<TiedImpl>();
    set_values(tied->embedding->weight, at::ones({3, 2}));
    ddp::DistributedDataParallel tied_model(tied);
    tied_model(indices({rank.rank()})).sum().backward();
    // By the lookup 3 in the looked up row; by the output 1 everywhere.
    RANK_CHECK(at::equal(tied->embedding->weight.grad().to_dense(),
                         at::tensor({2.5F, 2.5F, 2.5F, 2.5F, 1.0F, 1.0F}).view({3, 2})));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
