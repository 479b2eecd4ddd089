#include <test/process/models.h>
#include <test/support/catch2.h>
#include <test/support/checkpoint.h>

// DistributedDataParallel on forked ranks over Gloo: computing in a lower precision.

using ddp::MixedPrecision;
using ddp::test::bits_of_all;
using ddp::test::four_rows;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_layer;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;

namespace {

ddp::DistributedDataParallelOptions in(MixedPrecision precision) {
  return ddp::DistributedDataParallelOptions().mixed_precision(precision);
}

bool all_are(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  for (const auto& tensor : tensors) {
    if (tensor.scalar_type() != dtype ||
        (tensor.grad().defined() && tensor.grad().scalar_type() != dtype)) {
      return false;
    }
  }
  return true;
}

torch::nn::Sequential small_net() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(2, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
}

}  // namespace

TEST_CASE("mixed precision: computes in bfloat16, and parameters and gradients stay float") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto net = small_net();
    auto alone = small_net();
    alone->to(at::kBFloat16);
    ddp::DistributedDataParallel model(net, in(MixedPrecision().param_dtype(at::kBFloat16)));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/step != 2);
      const auto output = model(own_rows(four_rows(), rank));
      RANK_CHECK(output.scalar_type() == at::kBFloat16);
      output.pow(2).mean().backward();
      RANK_CHECK(all_are(net->parameters(), at::kFloat));
      // The same in one process, all in bfloat16: gradients to a few of its roundings.
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        set_values(alone->parameters()[i], net->parameters()[i]);
      }
      alone->zero_grad();
      alone->forward(four_rows().to(at::kBFloat16)).pow(2).mean().backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        const auto expected = alone->parameters()[i].grad().to(at::kFloat);
        RANK_CHECK((net->parameters()[i].grad() - expected).abs().max().item<float>() <=
                   0.04F * expected.abs().max().item<float>());
      }
      optimizer.step();
    }
    rank.report("weights", bits_of_all(net->parameters()));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["weights"] == results[1]["weights"]);
}

TEST_CASE("mixed precision: steps too small for the lower precision add up all the same") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto net = scalar_layer();
    ddp::DistributedDataParallel model(
        net, in(MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat)));
    torch::optim::SGD optimizer(model->parameters(), 1e-4);
    for (int step = 0; step < 100; ++step) {
      optimizer.zero_grad();
      {
        // Local passes end in the parameters' own precision, too.
        const auto guard = model->no_sync();
        model(at::ones({1, 1})).sum().backward();
        RANK_CHECK(all_are(net->parameters(), at::kFloat));
      }
      model(at::ones({1, 1}) * (rank.rank() + 1)).sum().backward();
      RANK_CHECK(net->weight.grad().item<float>() == 2.5F);
      optimizer.step();
    }
    RANK_CHECK(std::abs(net->weight.item<float>() - 0.975F) < 1e-5F);
    // Evaluation, on one rank alone.
    if (rank.rank() == 0) {
      const torch::NoGradGuard no_grad;
      RANK_CHECK(model(at::ones({1, 1})).scalar_type() == at::kBFloat16);
      RANK_CHECK(all_are(net->parameters(), at::kFloat));
      try {
        model(at::ones({1, 7}));
        RANK_CHECK(false);
      } catch (const c10::Error&) {
        RANK_CHECK(all_are(net->parameters(), at::kFloat));
      }
    }
    RANK_CHECK(std::abs(net->weight.item<float>() - 0.975F) < 1e-5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "mixed precision: nested backwards, local and reduced, and an evaluation before backward") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct CheckpointedImpl : torch::nn::Module {
      torch::nn::Linear layer = register_module("layer", scalar_layer());
      std::function<at::Tensor(const at::Tensor&)> body = [this](const at::Tensor& x) {
        return layer(x);
      };
      at::Tensor forward(const at::Tensor& x) { return ddp::test::Checkpoint::apply(x * 1, &body); }
    };
    const auto net = std::make_shared<CheckpointedImpl>();
    ddp::DistributedDataParallel model(net, in(MixedPrecision().param_dtype(at::kHalf)));
    const auto x = at::full({1, 1}, rank.rank() + 1.0F).set_requires_grad(true);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      {
        const auto guard = model->no_sync();
        model(x).sum().backward();
        RANK_CHECK(all_are(net->parameters(), at::kFloat));
      }
      const auto loss = model(x).sum();
      {
        const torch::NoGradGuard no_grad;
        model(x);
      }
      loss.backward();
      RANK_CHECK(all_are(net->parameters(), at::kFloat));
      RANK_CHECK(net->layer->weight.grad().item<float>() == 3.0F);
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("mixed precision: buffers, the wire alone, and what is refused") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct ScaledImpl : torch::nn::Module {
      at::Tensor w = register_parameter("w", at::ones({2}));
      at::Tensor k = register_buffer("k", at::full({2}, 3.0F));
      at::Tensor count = register_buffer("count", at::zeros({1}, at::kLong));
      at::Tensor forward(const at::Tensor& x) { return (w * k * x).sum(); }
    };
    const auto net = std::make_shared<ScaledImpl>();
    ddp::DistributedDataParallel model(
        net, in(MixedPrecision().reduce_dtype(at::kHalf).buffer_dtype(at::kBFloat16)));
    RANK_CHECK(net->k.scalar_type() == at::kBFloat16 && net->count.scalar_type() == at::kLong);
    // A gradient that float16 cannot tell from 0.
    const auto output = model(at::full({2}, 1e-9F));
    RANK_CHECK(output.scalar_type() == at::kFloat);
    output.backward();
    RANK_CHECK(at::equal(net->w.grad(), at::zeros({2})));
    rank.report("done", "yes");
    try {
      model->register_comm_hook(ddp::comm_hooks::allreduce());
      RANK_CHECK(false);
    } catch (const ddp::UsageError&) {
    }
    ddp::DistributedDataParallel wrong(net, in(MixedPrecision().param_dtype(at::kInt)));
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result["done"] == "yes");
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("mixed_precision: param_dtype is Int; expected a floating "
                                      "dtype"));
  }
}
