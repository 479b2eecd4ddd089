#include <csignal>
#include <test/process/models.h>
#include <test/support/catch2.h>

#include <torch/csrc/autograd/autograd.h>

// SyncBatchNorm on forked ranks over Gloo: what it refuses, and what becomes of ranks whose peers
// leave.

using ddp::SyncBatchNorm;
using ddp::SyncBatchNormOptions;
using ddp::test::InBackward;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::start;
using ddp::test::summary;

namespace {

/// The text of the UsageError that `act` throws.
std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const ddp::UsageError& error) {
    return error.what();
  }
  return "(accepted)";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("fewer than two values a channel over all ranks: an error on every rank, no harm done") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    SyncBatchNorm layer(2);
    for (const std::int64_t last : {0, 1}) {
      const auto text = refusal([&] { layer(at::ones({rank.rank() == 2 ? last : 0, 2})); });
      RANK_CHECK(has(text, "Expected more than 1 value per channel when training, found " +
                               std::to_string(last)));
      RANK_CHECK(has(text, "rank " + std::to_string(rank.rank())));
    }
    RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 0);
    RANK_CHECK(at::equal(layer->running_var, at::ones({2})));
    // Two values are enough, and the group is intact.
    layer(at::ones({rank.rank() == 1 ? 0 : 1, 2}));
    RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 1);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE("a graph on some ranks only: refused in forward, on every rank") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    SyncBatchNorm layer(2);
    const auto input = at::randn({3, 2}).set_requires_grad(true);
    const auto text = refusal([&] {
      const at::AutoGradMode mode(rank.rank() == 0);
      layer(input);
    });
    RANK_CHECK(has(text, "requires a gradient on rank 0"));
    RANK_CHECK(has(text, "no graph is recorded on rank 1"));
    layer(input).sum().backward();
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("SyncBatchNorm refuses inputs that do not fit before it communicates") {
  const auto results = run_ranks(2, [](const Rank& /*rank*/) {
    const auto check = [] {
      SyncBatchNorm layer(2);
      const auto f = [&](const at::Tensor& input) { return refusal([&] { layer(input); }); };
      RANK_CHECK(has(f(at::ones({2})), "the input is [2]; expected N x 2 x any dimensions"));
      RANK_CHECK(has(f(at::ones({4, 3})), "the input is [4, 3]"));
      RANK_CHECK(
          has(f(at::ones({4, 2}, at::kInt)), "the input is of dtype Int; convert it to float"));
      RANK_CHECK(has(f(at::Tensor()), "undefined"));
      RANK_CHECK(has(refusal([] { SyncBatchNorm(0)->forward(at::ones({4, 0})); }), "1 or more"));
    };
    check();
    RANK_CHECK(has(refusal([] {
                     SyncBatchNorm(2)->forward(at::ones({1, 2}));
                   }),
                   "Expected more than 1 value per channel"));
    start();
    check();
    const auto first = ddp::new_group({0});
    if (ddp::get_rank() == 1) {
      SyncBatchNorm layer(SyncBatchNormOptions(2).process_group(first));
      RANK_CHECK(has(refusal([&] { layer(at::ones({4, 2})); }), "not a member"));
    }
    ddp::barrier();
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("second derivatives are refused, first ones with a graph are not") {
  const bool affine = GENERATE(true, false);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    torch::manual_seed(rank.rank());
    SyncBatchNorm layer(SyncBatchNormOptions(2).affine(affine));
    const auto input = at::randn({3, 2}).set_requires_grad(true);
    const auto once = torch::autograd::grad({layer(input).pow(3).sum()}, {input})[0];
    const auto twice = torch::autograd::grad({layer(input).pow(3).sum()}, {input}, {},
                                             /*retain_graph=*/true, /*create_graph=*/true)[0];
    RANK_CHECK(at::equal(once, twice) && twice.requires_grad());
    RANK_CHECK(has(refusal([&] { twice.square().sum().backward(); }),
                   "a gradient that went through it was differentiated a second time"));
    // Of a sum, too, whose own derivative is a constant.
    const auto of_sum = torch::autograd::grad({layer(input).sum()}, {input}, {},
                                              /*retain_graph=*/true, /*create_graph=*/true)[0];
    RANK_CHECK(has(refusal([&] { of_sum.sum().backward(); }),
                   "a gradient that went through it was differentiated a second time"));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("a rank killed before its forward or backward: its peers end in seconds and name it") {
  const auto where =
      GENERATE(std::pair(true, false), std::pair(false, false), std::pair(false, true));
  const bool in_forward = where.first;
  const bool wrapped = where.second;
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    torch::nn::Sequential net(torch::nn::Linear(4, 4), SyncBatchNorm(4));
    std::optional<ddp::DistributedDataParallel<torch::nn::Sequential>> model;
    if (wrapped) {
      model.emplace(net);
    }
    int step = 0;
    std::function<void()> die = [&] {
      if (rank.rank() == 1 && step == 3) {
        raise(SIGKILL);
      }
    };
    try {
      for (; step < 6; ++step) {
        if (in_forward) {
          die();
        }
        const auto rows = at::randn({3, 4});
        auto output = wrapped ? (*model)->forward(rows) : net->forward(rows);
        if (!in_forward) {
          output = InBackward::apply(output, &die);
        }
        output.square().sum().backward();
      }
    } catch (...) {
      ddp::destroy_process_group();
      throw;
    }
  });
  INFO(summary(results));
  CHECK(results[1].status == 128 + SIGKILL);
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("rank 1") || contains("ranks 1"));
    CHECK_THAT(results[rank].error,
               contains(in_forward ? "SyncBatchNorm's all-gather of batch statistics"
                                   : "SyncBatchNorm's all-reduce in backward"));
    CHECK(results[rank].seconds < 15);
  }
}
