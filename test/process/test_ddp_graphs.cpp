#include <test/process/models.h>
#include <test/support/catch2.h>
#include <test/support/checkpoint.h>

// DistributedDataParallel on forked ranks over Gloo: graphs out of the ordinary.

using ddp::test::bits_of_all;
using ddp::test::Checkpoint;
using ddp::test::four_rows;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

/// Two layers of one shape, each used as often as wanted, in checkpoints or not.
struct RepeatedImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(2, 2));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(2, 2));
  std::function<at::Tensor(const at::Tensor&)> body = [this](const at::Tensor& x) {
    return at::tanh(second(at::tanh(first(x))));
  };
  at::Tensor forward(const at::Tensor& x, int times, bool in_checkpoints) {
    auto y = x;
    for (int i = 0; i < times; ++i) {
      y = in_checkpoints ? Checkpoint::apply(y, &body) : body(y);
    }
    return y;
  }
};
TORCH_MODULE(Repeated);

void copy_parameters(const torch::nn::Module& from, const torch::nn::Module& to) {
  for (std::size_t i = 0; i < from.parameters().size(); ++i) {
    set_values(to.parameters()[i], from.parameters()[i]);
  }
}

bool same_gradients(const torch::nn::Module& left, const torch::nn::Module& right) {
  for (std::size_t i = 0; i < left.parameters().size(); ++i) {
    if (!at::allclose(left.parameters()[i].grad(), right.parameters()[i].grad(), 0, 1e-6)) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE(
    "re-entrant checkpoints: the gradients of the full batch without them, on 2 and 3 ranks") {
  for (const int ranks : {2, 3}) {
    for (const int times : {1, 3}) {
      const auto results = run_ranks(ranks, [times](const Rank& rank) {
        start();
        torch::manual_seed(1);
        Repeated net;
        Repeated alone;
        copy_parameters(*net, *alone);
        // Used in several checkpoints, the graph has to be static.
        ddp::DistributedDataParallel model(
            net, ddp::DistributedDataParallelOptions().static_graph(times > 1).bucket_cap_mb(1e-5));
        const auto rows = at::sin(at::arange(12, at::kFloat)).view({6, 2});
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        torch::optim::SGD reference(alone->parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          reference.zero_grad();
          // A leaf that requires a gradient, since re-entrant checkpoints need one.
          const auto x = own_rows(rows, rank).set_requires_grad(true);
          model(x, times, true).pow(2).mean().backward();
          alone->forward(rows, times, false).pow(2).mean().backward();
          RANK_CHECK(same_gradients(*net, *alone));
          optimizer.step();
          reference.step();
        }
        rank.report("weights", bits_of_all(net->parameters()));
        ddp::destroy_process_group();
      });
      INFO(times << " times" << summary(results));
      for (const auto& result : results) {
        CHECK(result.status == 0);
        CHECK(result["weights"] == results[0]["weights"]);
      }
    }
  }
}

TEST_CASE(
    "a static graph that changes on every rank is an error that names it, and training goes on") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().static_graph(true));
    const auto pass = [&](bool use_b) {
      net->zero_grad();
      model(ddp::test::scalar_input(rank), true, use_b).sum().backward();
    };
    pass(true);
    pass(true);
    std::string text;
    try {
      pass(false);
    } catch (const ddp::UsageError& error) {
      text = error.what();
    }
    rank.report("error", text);
    pass(true);
    RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["error"], contains("the graph is not static") && contains("b.weight"));
  }
}

TEST_CASE(
    "C01: a weight that was tied by assignment leaves the registered one unused, which is named") {
  const auto results = run_ranks(2, [](const Rank& /*rank*/) {
    start();
    struct AssignedImpl : torch::nn::Module {
      torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(3, 2));
      torch::nn::Linear out =
          register_module("out", torch::nn::Linear(torch::nn::LinearOptions(2, 3).bias(false)));
      at::Tensor forward(const at::Tensor& rows) { return out(embedding(rows)); }
    };
    const auto net = std::make_shared<AssignedImpl>();
    net->out->weight = net->embedding->weight;
    ddp::DistributedDataParallel model(net);
    model(at::tensor({0, 2}, at::kLong)).sum().backward();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("out.weight"));
  }
}

TEST_CASE(
    "C09: a buffer member that is assigned anew is another tensor; the registered one is "
    "synchronised") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct ReassignedImpl : torch::nn::Module {
      at::Tensor w = register_parameter("w", at::ones({1}));
      at::Tensor k = register_buffer("k", at::ones({1}));
      at::Tensor forward(const at::Tensor& x) { return w * x * k; }
    };
    const auto net = std::make_shared<ReassignedImpl>();
    ddp::DistributedDataParallel model(net);
    model(at::ones({1})).sum().backward();
    net->k = net->k + (rank.rank() + 1);
    net->named_buffers()["k"].add_(10 * rank.rank());
    net->zero_grad();
    model(at::ones({1})).sum().backward();
    RANK_CHECK(net->k.item<float>() == 2.0F + rank.rank());
    RANK_CHECK(net->named_buffers()["k"].item<float>() == 1.0F);
    RANK_CHECK(net->w.grad().item<float>() == 2.5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("two forwards and two backwards, on ranks: each is reduced") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Tanh(), torch::nn::Linear(3, 1));
    torch::nn::Sequential alone(torch::nn::Linear(2, 3), torch::nn::Tanh(),
                                torch::nn::Linear(3, 1));
    copy_parameters(*net, *alone);
    ddp::DistributedDataParallel model(net);
    const auto rows = own_rows(four_rows(), rank);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      alone->zero_grad();
      const auto first = model(rows).pow(2).mean();
      const auto second = model(rows + 1).pow(2).mean();
      first.backward({}, /*retain_graph=*/true);
      second.backward();
      first.backward();
      (2 * alone->forward(four_rows()).pow(2).mean() +
       alone->forward(four_rows() + 1).pow(2).mean())
          .backward();
      RANK_CHECK(same_gradients(*net, *alone));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("thousands of tiny parameters of several dtypes and one larger than the cap") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct ManyImpl : torch::nn::Module {
      ManyImpl() {
        const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                        at::kComplexFloat};
        for (int i = 0; i < 3000; ++i) {
          register_parameter("p" + std::to_string(i), at::ones({2}, types[i % 5]));
        }
        register_parameter("large", at::ones({300000}));
      }
      at::Tensor forward(double x) {
        auto loss = at::zeros({}, at::kDouble);
        for (const auto& parameter : parameters()) {
          const auto real = parameter.is_complex() ? at::real(parameter) : parameter;
          loss = loss + (real * x).sum().to(at::kDouble);
        }
        return loss;
      }
    };
    const auto net = std::make_shared<ManyImpl>();
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(0.01));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model->forward(rank.rank() + 1.0).backward();
      for (const auto& parameter : net->parameters()) {
        const auto real = parameter.is_complex() ? at::real(parameter.grad()) : parameter.grad();
        RANK_CHECK(real.eq(1.5).all().item<bool>());
        RANK_CHECK(parameter.grad().scalar_type() == parameter.scalar_type());
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
