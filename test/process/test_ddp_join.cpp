#include <csignal>
#include <test/process/models.h>
#include <test/support/catch2.h>

// DistributedDataParallel on forked ranks over Gloo: uneven inputs.

using ddp::test::bits;
using ddp::test::bits_of_all;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

torch::nn::Linear zero_layer() {
  torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
  set_values(layer->weight, at::zeros({1}));
  return layer;
}

void check_all_ended(const std::vector<ddp::test::RankResult>& results) {
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["weights"] == results[0]["weights"]);
  }
}

}  // namespace

TEST_CASE("C04: with join, ranks with 3 and 5 batches end with the same weight") {
  for (const bool by_world_size : {true, false}) {
    const auto results = run_ranks(2, [by_world_size](const Rank& rank) {
      start();
      auto net = zero_layer();
      ddp::DistributedDataParallel model(net);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      model->join(
          [&] {
            for (int step = 0; step < (rank.rank() == 0 ? 3 : 5); ++step) {
              optimizer.zero_grad();
              model(at::ones({1, 1})).sum().backward();
              optimizer.step();
            }
          },
          ddp::JoinOptions().divide_by_initial_world_size(by_world_size));
      RANK_CHECK(std::abs(net->weight.item<float>() - (by_world_size ? -0.4F : -0.5F)) < 1e-6F);
      // Training goes on afterwards.
      optimizer.zero_grad();
      model(scalar_input(rank)).sum().backward();
      RANK_CHECK(net->weight.grad().item<float>() == 1.5F);
      rank.report("weights", bits(net->weight));
      ddp::destroy_process_group();
    });
    check_all_ended(results);
  }
}

TEST_CASE("join: buffers, a new bucket layout, accumulation, unused layers, hooks; 4 ranks") {
  for (const bool with_hook : {false, true}) {
    const auto results = run_ranks(4, [with_hook](const Rank& rank) {
      start();
      torch::manual_seed(rank.rank());
      torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3),
                                torch::nn::Linear(3, 1));
      ddp::DistributedDataParallel model(
          net, ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-5).find_unused_parameters(
                   !with_hook));
      if (with_hook) {
        model->register_comm_hook(ddp::comm_hooks::fp16_compress());
      }
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      // Rank 0 has no input at all; the last rank has most.
      model->join([&] {
        for (int step = 0; step < 2 * rank.rank(); ++step) {
          const auto x = at::sin(at::arange(8, at::kFloat).view({4, 2}) + rank.rank() + step);
          optimizer.zero_grad();
          {
            const auto guard = model->no_sync();
            model(x).pow(2).sum().backward();
          }
          // Two forwards before one backward, and two backwards.
          (model(x) + model(x + 1)).pow(2).sum().backward();
          model(x).sum().backward();
          optimizer.step();
        }
      });
      rank.report("weights", bits_of_all(net->parameters()) + bits_of_all(net->buffers()));
      ddp::destroy_process_group();
    });
    check_all_ended(results);
  }
}

TEST_CASE("join: with a static graph, sparse gradients and nobody who has input") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)),
                              torch::nn::Linear(2, 1));
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().static_graph(true));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (const int least : {0, 1, 1}) {
      model->join([&] {
        for (int step = 0; step < least * (rank.rank() + 1); ++step) {
          optimizer.zero_grad();
          model(at::tensor({rank.rank(), step % 4}, at::kLong)).pow(2).sum().backward();
          optimizer.step();
        }
      });
    }
    rank.report("weights", bits_of_all(net->parameters()));
    ddp::destroy_process_group();
  });
  check_all_ended(results);
}

TEST_CASE("join: throw_on_early_termination ends every rank with an error that names the rank") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    auto net = zero_layer();
    ddp::DistributedDataParallel model(net);
    const auto train = [&](int steps) {
      model->join(
          [&] {
            for (int step = 0; step < steps; ++step) {
              model(at::ones({1, 1})).sum().backward();
            }
          },
          ddp::JoinOptions().throw_on_early_termination(true));
    };
    train(2);  // alike on all ranks: no error
    try {
      train(rank.rank() == 1 ? 1 : 3);
    } catch (const ddp::UsageError& error) {
      rank.report("error", error.what());
    }
    // The group is whole all the same.
    net->zero_grad();
    model(scalar_input(rank)).sum().backward();
    RANK_CHECK(net->weight.grad().item<float>() == 2.0F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["error"], contains("rank 1 ran out of inputs"));
  }
}

TEST_CASE("join: ranks that do different things, or leave, end in errors that say so") {
  const auto differ = run_ranks(
      3,
      [](const Rank& rank) {
        start();
        Two net;
        net->register_buffer("buffer", at::ones({1}));
        ddp::DistributedDataParallel model(net);
        model->join([&] {
          if (rank.rank() == 2) {
            return;
          }
          auto loss = model(scalar_input(rank)).sum();
          loss.backward({}, /*retain_graph=*/true);
          if (rank.rank() == 0) {
            loss.backward();
          } else {
            model(scalar_input(rank));
          }
        });
      },
      ddp::test::within(40));
  for (const auto& result : differ) {
    INFO(summary(differ));
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("rank 0 is in a backward, rank 1 is in a forward"));
  }

  const auto thrown = run_ranks(3, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    model->join([&] {
      for (int step = 0; step < (rank.rank() == 2 ? 0 : 3); ++step) {
        model(scalar_input(rank)).sum().backward();
        if (rank.rank() == 0 && step == 1) {
          throw std::domain_error("the data are damaged");
        }
      }
    });
  });
  INFO(summary(thrown));
  CHECK_THAT(thrown[0].error, contains("the data are damaged"));
  for (const int rank : {1, 2}) {
    CHECK(thrown[rank].error_type == "CommunicationError");
    CHECK_THAT(thrown[rank].error, contains("rank 0") && contains("the data are damaged"));
    CHECK(thrown[rank].seconds < 14);
  }

  const auto killed = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    model->join([&] {
      if (rank.rank() == 1) {
        model(scalar_input(rank)).sum().backward();
        raise(SIGKILL);
      }
    });
  });
  INFO(summary(killed));
  CHECK(killed[0].error_type == "CommunicationError");
  CHECK_THAT(killed[0].error, contains("rank 1"));
}

TEST_CASE(
    "join: refused inside another one and with python_compatible; enable(false) runs the body") {
  const auto results = run_ranks(1, [](const Rank& /*rank*/) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    const auto text = [](auto&& call) -> std::string {
      try {
        call();
      } catch (const ddp::UsageError& error) {
        return error.what();
      }
      return "";
    };
    RANK_CHECK(text([&] { model->join([&] { model->join([] {}); }); }).find("in a join already") !=
               std::string::npos);
    bool ran = false;
    model->join([&] { ran = true; }, ddp::JoinOptions().enable(false));
    RANK_CHECK(ran);
    ddp::DistributedDataParallel compatible(
        net, ddp::DistributedDataParallelOptions().python_compatible(true));
    RANK_CHECK(text([&] { compatible->join([] {}); }).find("python_compatible") !=
               std::string::npos);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
}
