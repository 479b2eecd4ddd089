#include <test/process/models.h>
#include <test/support/catch2.h>

// DistributedDataParallel on forked ranks over Gloo: unused parameters, accumulation, buffers.

using ddp::test::bits;
using ddp::test::bits_of_all;
using ddp::test::four_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

TEST_CASE(
    "C02: an unused parameter is an error of the first backward on every rank, which names it") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    bool thrown = false;
    try {
      model(scalar_input(rank), true, false).sum().backward();
    } catch (const ddp::UsageError& error) {
      thrown = std::string(error.what()).find("b.weight") != std::string::npos;
    }
    RANK_CHECK(thrown);
    // All ranks failed alike, so the group goes on: the next step is whole.
    optimizer.zero_grad();
    model(scalar_input(rank)).sum().backward();
    RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
    RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
    optimizer.step();
    rank.report("weights", bits_of_all(net->parameters()));
    // Uncaught, it ends the rank.
    model(scalar_input(rank), true, false).sum().backward();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("b.weight"));
    CHECK(result.seconds < 20);
    CHECK(result["weights"] == results[0]["weights"]);
  }
}

TEST_CASE(
    "C02: with the search on, an unused parameter has no gradient and the others are averaged") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(scalar_input(rank), true, false).sum().backward();
      RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
      RANK_CHECK(!net->b->weight.grad().defined());
    }
    // Used on one rank only: the other contributes zeros, and both get the average.
    net->zero_grad();
    model(scalar_input(rank), true, rank.rank() == 1).sum().backward();
    RANK_CHECK(net->b->weight.grad().item<float>() == 1.0F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("C03: a parameter used only inside no_sync is reduced with the synchronised micro-step") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(true));
    {
      const auto guard = model->no_sync();
      model(scalar_input(rank), true, false).sum().backward();
      RANK_CHECK(net->a->weight.grad().item<float>() == rank.rank() + 1.0F);
    }
    model(scalar_input(rank), false, true).sum().backward();
    RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
    RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("no_sync accumulates locally, nests, and the pass after it averages the sum") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    const auto backward = [&] { model(scalar_input(rank)).sum().backward(); };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(/*set_to_none=*/step % 2 == 0);
      {
        const auto outer = model->no_sync();
        backward();
        {
          const auto inner = model->no_sync();
          backward();
        }
        backward();
        RANK_CHECK(net->a->weight.grad().item<float>() == 3 * (rank.rank() + 1.0F));
      }
      backward();
      RANK_CHECK(net->a->weight.grad().item<float>() == 4 * 1.5F);
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "buffers: rank 0's reach all before the first forward of a step, once, and never without "
    "gradients") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct ScaledImpl : torch::nn::Module {
      at::Tensor w = register_parameter("w", at::ones({2}));
      at::Tensor k = register_buffer("k", at::full({2}, 3.0F));
      at::Tensor forward(const at::Tensor& x) { return (w * x * named_buffers()["k"]).sum(); }
    };
    const auto net = std::make_shared<ScaledImpl>();
    ddp::DistributedDataParallel model(net);
    const auto x = at::tensor({1.0F, 2.0F}) * (rank.rank() + 1);
    // C10: two forwards before one backward. The second must not change what the first one saved.
    (model(x) + model(x)).backward();
    RANK_CHECK(at::equal(net->w.grad(), at::tensor({9.0F, 18.0F})));
    // C09: changed in place, then by set_data.
    net->zero_grad();
    net->k.add_(rank.rank() == 0 ? 1 : 100);
    model(x).backward();
    RANK_CHECK(at::equal(net->k, at::full({2}, 4.0F)));
    RANK_CHECK(at::equal(net->w.grad(), at::tensor({6.0F, 12.0F})));
    net->zero_grad();
    net->k.set_data(at::full({2}, 10.0F + rank.rank()));
    model(x).backward();
    RANK_CHECK(at::equal(net->k, at::full({2}, 10.0F)));
    // Accumulation: the step's first forward is a local one.
    net->zero_grad();
    net->k.add_(rank.rank());
    {
      const auto guard = model->no_sync();
      model(x).backward();
      RANK_CHECK(at::equal(net->k, at::full({2}, 10.0F)));
      net->k.add_(rank.rank());
      model(x).backward();
      RANK_CHECK(at::equal(net->k, at::full({2}, 10.0F + rank.rank())));
    }
    model(x).backward();
    RANK_CHECK(at::equal(net->k, at::full({2}, 10.0F + rank.rank())));
    // One rank alone evaluates through the wrapper.
    if (rank.rank() == 0) {
      const torch::NoGradGuard no_grad;
      model->eval();
      model(x);
      model(x);
      model->train();
    }
    net->zero_grad();
    model(x).backward();
    RANK_CHECK(at::equal(net->k, at::full({2}, 10.0F)));
    rank.report("w", bits(net->w.grad()));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["w"] == results[1]["w"]);
}

TEST_CASE(
    "C10: BatchNorm with two forwards before one backward equals the same program on one process") {
  const auto results = run_ranks(2, [](const Rank& /*rank*/) {
    start();
    torch::manual_seed(7);
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    torch::nn::Sequential alone(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      set_values(alone->parameters()[i], net->parameters()[i]);
    }
    ddp::DistributedDataParallel model(net);
    const auto rows = four_rows();
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      alone->zero_grad();
      (model(rows) + model(rows + 1)).pow(2).sum().backward();
      (alone->forward(rows) + alone->forward(rows + 1)).pow(2).sum().backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        RANK_CHECK(at::equal(net->parameters()[i].grad(), alone->parameters()[i].grad()));
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("C20: rank 0 alone evaluates through the wrapper, and training goes on") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    ddp::DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto x = at::sin(at::arange(8, at::kFloat).view({4, 2}) + rank.rank());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(x).pow(3).sum().backward();
      optimizer.step();
      if (step == 0 && rank.rank() == 0) {
        const torch::NoGradGuard no_grad;
        model->eval();
        RANK_CHECK(at::equal(model(x), model(x)));
        model->train();
      }
    }
    rank.report("weights", bits_of_all(net->parameters()));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["weights"] == results[1]["weights"]);
}
