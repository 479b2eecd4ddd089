#include <test/process/models.h>
#include <test/support/catch2.h>

// SyncBatchNorm on forked ranks over Gloo: what it computes. A reference is a plain BatchNorm over
// all ranks' rows, computed on each rank.

using ddp::SyncBatchNorm;
using ddp::SyncBatchNormOptions;
using ddp::test::bits;
using ddp::test::Rank;
using ddp::test::RankResult;
using ddp::test::run_ranks;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;

namespace {

void check_all_good(const std::vector<RankResult>& results) {
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

bool near(const at::Tensor& left, const at::Tensor& right, double tolerance) {
  return left.sizes() == right.sizes() &&
         at::allclose(left.to(at::kDouble), right.to(at::kDouble), tolerance, tolerance);
}

at::Tensor summed(const at::Tensor& tensor) {
  auto sum = tensor.detach().clone();
  ddp::all_reduce(sum);
  return sum;
}

struct Case {
  std::vector<std::int64_t> shape;
  /// The rows of each rank.
  std::vector<std::int64_t> split;
  SyncBatchNormOptions options{3};
  at::ScalarType dtype = at::kFloat;
  at::ScalarType parameter_dtype = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  double tolerance = 1e-5;
};

torch::nn::BatchNorm1d plain(const SyncBatchNormOptions& options) {
  return torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(options.num_features())
                                    .eps(options.eps())
                                    .momentum(options.momentum())
                                    .affine(options.affine())
                                    .track_running_stats(options.track_running_stats()));
}

/// Three steps of both: outputs, gradients and running statistics are the same.
void check_equals_full_batch(const Rank& rank, const Case& test) {
  torch::manual_seed(3);
  SyncBatchNorm layer(test.options);
  auto reference = plain(test.options);
  // The reference of half types computes in float, on the same rounded inputs.
  const auto exact = test.dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (test.options.affine()) {
    set_values(layer->weight, at::tensor({0.5F, -1.25F, 2.0F}));
    set_values(layer->bias, at::tensor({1.0F, 0.0F, -0.5F}));
    set_values(reference->weight, layer->weight.detach());
    set_values(reference->bias, layer->bias.detach());
  }
  layer->to(test.parameter_dtype);
  reference->to(exact);
  for (int step = 0; step < 3; ++step) {
    const auto full = (at::randn(test.shape, at::kDouble) * 3 + 10 * step + 1).to(test.dtype);
    const auto weights = at::randn(test.shape, at::kDouble).to(test.dtype);
    const auto own = [&](const at::Tensor& rows) {
      return rows.split_with_sizes(test.split)[rank.rank()];
    };
    const auto input = own(full).contiguous(test.format).detach().clone().set_requires_grad(true);
    const auto output = layer(input);
    RANK_CHECK(output.scalar_type() == test.dtype);
    RANK_CHECK(output.is_contiguous(test.format));
    (output * own(weights)).sum().backward();

    const auto all = full.to(exact).view({test.shape[0], 3, -1}).set_requires_grad(true);
    const auto expected = reference(all);
    (expected.view(test.shape) * weights.to(exact)).sum().backward();
    RANK_CHECK(near(output, own(expected.view(test.shape)), test.tolerance));
    RANK_CHECK(near(input.grad(), own(all.grad().view(test.shape)), test.tolerance));
    RANK_CHECK(input.grad().is_contiguous(test.format));
    if (test.options.affine()) {
      RANK_CHECK(layer->weight.grad().scalar_type() == test.parameter_dtype);
      RANK_CHECK(near(summed(layer->weight.grad()), reference->weight.grad(), 10 * test.tolerance));
      RANK_CHECK(near(summed(layer->bias.grad()), reference->bias.grad(), 10 * test.tolerance));
      layer->zero_grad();
      reference->zero_grad();
    }
    if (test.options.track_running_stats()) {
      RANK_CHECK(near(layer->running_mean, reference->running_mean, test.tolerance));
      RANK_CHECK(near(layer->running_var, reference->running_var, test.tolerance));
      RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == step + 1);
    }
  }
  if (test.options.track_running_stats()) {
    layer->eval();
    reference->eval();
    const auto rows = at::randn({4, 3, 2}).to(test.dtype);
    RANK_CHECK(near(layer(rows), reference(rows.to(exact)), test.tolerance));
  }
}

void check_cases(const std::vector<Case>& cases) {
  const auto world_size = static_cast<int>(cases.front().split.size());
  check_all_good(run_ranks(world_size, [&](const Rank& rank) {
    start();
    for (const auto& test : cases) {
      check_equals_full_batch(rank, test);
    }
    ddp::destroy_process_group();
  }));
}

}  // namespace

TEST_CASE("C18: two ranks with rows of one feature: statistics, outputs and input gradients") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    const bool first = rank.rank() == 0;
    const auto column = [](std::vector<float> values) { return at::tensor(values).view({-1, 1}); };
    SyncBatchNorm layer(SyncBatchNormOptions(1).momentum(0.1));
    const auto input = column(first ? std::vector<float>{1, 3} : std::vector<float>{5, 7, 9, 11})
                           .set_requires_grad(true);
    const auto weights = column(first ? std::vector<float>{1, 0} : std::vector<float>{0, 2, 0, 0});
    const auto output = layer(input);
    (output * weights).sum().backward();
    const auto is = [&](const at::Tensor& tensor, std::vector<float> values) {
      return at::allclose(tensor, column(values), 0, 1e-5);
    };
    RANK_CHECK(is(output, first ? std::vector<float>{-1.463849F, -0.878310F}
                                : std::vector<float>{-0.292770F, 0.292770F, 0.878310F, 1.463849F}));
    RANK_CHECK(is(input.grad(),
                  first ? std::vector<float>{0.0836486F, -0.1840267F}
                        : std::vector<float>{-0.1589322F, 0.4517021F, -0.1087431F, -0.0836486F}));
    RANK_CHECK(std::abs(layer->running_mean.item<float>() - 0.6) < 1e-5);
    RANK_CHECK(std::abs(layer->running_var.item<float>() - 2.3) < 1e-5);
    RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 1);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("equals a BatchNorm over the full batch: dimensions, dtypes, options") {
  const SyncBatchNormOptions options(3);
  const auto cumulative = SyncBatchNormOptions(3).momentum(std::nullopt).eps(1e-3);
  const auto bare = SyncBatchNormOptions(3).affine(false).track_running_stats(false);
  const auto double_case = [&](Case test) {
    test.dtype = test.parameter_dtype = at::kDouble;
    test.tolerance = 1e-11;
    return test;
  };
  check_cases({
      {{6, 3}, {2, 4}, options},
      {{5, 3, 4}, {3, 2}, options},
      {{4, 3, 5, 2}, {2, 2}, options},
      {{3, 3, 2, 3, 2}, {1, 2}, options},
      {{5, 3, 2, 1, 2, 2}, {4, 1}, options},
      double_case({{6, 3}, {1, 5}, options}),
      double_case({{6, 3, 5, 2}, {1, 5}, cumulative}),
      double_case({{6, 3, 5}, {4, 2}, bare}),
  });
}

TEST_CASE("equals a BatchNorm over the full batch: uneven and empty batches on three ranks") {
  const auto cumulative = SyncBatchNormOptions(3).momentum(std::nullopt);
  const auto bare = SyncBatchNormOptions(3).affine(false);
  check_cases({
      {{7, 3}, {1, 4, 2}, SyncBatchNormOptions(3)},
      {{7, 3, 2, 2}, {0, 4, 3}, SyncBatchNormOptions(3)},
      {{4, 3, 2, 2}, {0, 0, 4}, cumulative},
      {{4, 3}, {3, 0, 1}, bare},
      {{2, 3},
       {1, 0, 1},
       SyncBatchNormOptions(3),
       at::kDouble,
       at::kDouble,
       at::MemoryFormat::Contiguous,
       1e-9},
  });
}

TEST_CASE("equals a BatchNorm over the full batch: half and bfloat16, with float parameters too") {
  std::vector<Case> cases;
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const auto parameters : {dtype, at::kFloat}) {
      for (const bool affine : {true, false}) {
        cases.push_back({{8, 3, 3, 2},
                         {5, 3},
                         SyncBatchNormOptions(3).affine(affine),
                         dtype,
                         parameters,
                         at::MemoryFormat::Contiguous,
                         dtype == at::kHalf ? 4e-3 : 3e-2});
      }
    }
  }
  check_cases(cases);
}

TEST_CASE("half inputs: statistics are in float") {
  // In half, values around 2000 have steps of 1 or 2, and their squares are infinite.
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    SyncBatchNorm layer(SyncBatchNormOptions(1).momentum(1));
    const auto rows = (at::arange(8) + 2000 + 8 * rank.rank()).to(at::kHalf).view({8, 1});
    layer(rows);
    RANK_CHECK(std::abs(layer->running_mean.item<float>() - 2007.5) < 1e-3);
    RANK_CHECK(std::abs(layer->running_var.item<float>() - 272.0 / 12) < 1e-3);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("channels_last inputs: outputs and gradients keep the layout") {
  std::vector<Case> cases;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    cases.push_back({{4, 3, 4, 5},
                     {1, 3},
                     SyncBatchNormOptions(3),
                     dtype,
                     at::kFloat,
                     at::MemoryFormat::ChannelsLast,
                     dtype == at::kFloat ? 1e-5 : 3e-2});
  }
  cases.push_back({{4, 3, 2, 4, 5},
                   {2, 2},
                   SyncBatchNormOptions(3),
                   at::kFloat,
                   at::kFloat,
                   at::MemoryFormat::ChannelsLast3d});
  check_cases(cases);
}

TEST_CASE("inputs that are neither contiguous nor channels_last") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(rank.rank());
    const auto whole = at::randn({3, 8, 5, 4});
    const auto strided = whole.slice(1, 0, 8, 2).transpose(2, 3);
    SyncBatchNorm layer(4);
    SyncBatchNorm other(4);
    const auto leaf = strided.detach().requires_grad_();
    const auto dense = strided.contiguous().requires_grad_();
    const auto output = layer(leaf);
    const auto expected = other(dense);
    RANK_CHECK(at::equal(output, expected));
    output.square().mul(output).sum().backward();
    expected.square().mul(expected).sum().backward();
    RANK_CHECK(near(leaf.grad(), dense.grad(), 1e-6));
    ddp::destroy_process_group();
  }));
}

TEST_CASE("values far from zero: the variance is sound") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    SyncBatchNorm layer(SyncBatchNormOptions(1).momentum(1));
    layer((at::arange(4).to(at::kFloat) + 1e4F + 4 * rank.rank()).view({4, 1}));
    RANK_CHECK(layer->running_mean.item<float>() == 10003.5F);
    RANK_CHECK(std::abs(layer->running_var.item<float>() - 6.0) < 1e-4);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("input gradients are the numeric derivatives of the ranks' losses together") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(5 + rank.rank());
    SyncBatchNorm layer(2);
    layer->to(at::kDouble);
    set_values(layer->weight, at::tensor({0.7, -1.3}, at::kDouble));
    const auto input = at::randn({rank.rank() + 1, 2, 2}, at::kDouble).set_requires_grad(true);
    const auto weights = at::randn_like(input);
    const auto loss = [&](const at::Tensor& x) {
      const auto y = layer(x);
      return (y * weights + y.pow(3)).sum();
    };
    loss(input).backward();
    constexpr double kStep = 1e-5;
    for (int owner = 0; owner < 2; ++owner) {
      for (int element = 0; element < 4 * (owner + 1); ++element) {
        double difference = 0;
        for (const double sign : {1.0, -1.0}) {
          const auto moved = input.detach().clone();
          if (rank.rank() == owner) {
            moved.view(-1)[element] += sign * kStep;
          }
          const at::NoGradGuard no_grad;
          difference += sign * summed(loss(moved)).item<double>();
        }
        RANK_CHECK(rank.rank() != owner || std::abs(input.grad().view(-1)[element].item<double>() -
                                                    difference / (2 * kStep)) < 1e-7);
      }
    }
    ddp::destroy_process_group();
  }));
}

TEST_CASE("without gradients of the input, of the weights, and of anything") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(11);
    const auto full = at::randn({6, 3});
    const auto own = ddp::test::own_rows(full, rank);
    auto reference = plain(3);
    const auto expected = reference(full);
    SyncBatchNorm layer(3);
    // The first layer of a model.
    auto output = layer(own);
    RANK_CHECK(near(output, ddp::test::own_rows(expected, rank), 1e-6));
    output.pow(3).sum().backward();
    expected.pow(3).sum().backward();
    RANK_CHECK(near(summed(layer->weight.grad()), reference->weight.grad(), 1e-5));
    // An input with a gradient on one rank only.
    const auto input = own.clone().set_requires_grad(rank.rank() == 1);
    layer(input).pow(3).sum().backward();
    const auto all = full.clone().set_requires_grad(true);
    reference(all).pow(3).sum().backward();
    RANK_CHECK(rank.rank() == 0 || near(input.grad(), ddp::test::own_rows(all.grad(), rank), 1e-5));
    // Frozen weights.
    layer->weight.set_requires_grad(false);
    layer->bias.set_requires_grad(false);
    layer->zero_grad();
    const auto again = own.clone().set_requires_grad(true);
    layer(again).pow(3).sum().backward();
    RANK_CHECK(near(again.grad(), ddp::test::own_rows(all.grad(), rank), 1e-5));
    RANK_CHECK(!layer(own).requires_grad());
    // No graph at all: the statistics are the ranks' all the same.
    const at::NoGradGuard no_grad;
    SyncBatchNorm fresh(3);
    RANK_CHECK(near(fresh(own), ddp::test::own_rows(expected, rank), 1e-6));
    RANK_CHECK(near(fresh->running_mean, full.mean(0) * 0.1, 1e-6));
    ddp::destroy_process_group();
  }));
}

TEST_CASE("several forwards before a backward, and a backward twice") {
  check_all_good(run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(17);
    const auto full = at::randn({6, 3});
    SyncBatchNorm layer(3);
    auto reference = plain(3);
    const auto input = ddp::test::own_rows(full, rank).set_requires_grad(true);
    const auto all = full.clone().set_requires_grad(true);
    const auto loss = (layer(input).pow(3) * layer(input * input)).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    (reference(all).pow(3) * reference(all * all)).sum().mul(2).backward();
    RANK_CHECK(near(input.grad(), ddp::test::own_rows(all.grad(), rank), 1e-5));
    RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 2);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("evaluation mode communicates nothing: one rank alone runs it") {
  const bool tracks = GENERATE(true, false);
  check_all_good(run_ranks(2, [&](const Rank& rank) {
    start();
    SyncBatchNorm layer(SyncBatchNormOptions(3).track_running_stats(tracks));
    auto reference = plain(layer->options);
    layer->eval();
    reference->eval();
    if (rank.rank() == 1) {
      const auto input = at::randn({4, 3}).set_requires_grad(true);
      const auto output = layer(input);
      RANK_CHECK(bits(output) == bits(reference(input)));
      output.pow(2).sum().backward();
      RANK_CHECK(!tracks || layer->num_batches_tracked.item<std::int64_t>() == 0);
    }
    ddp::barrier();
    ddp::destroy_process_group();
  }));
}

TEST_CASE("without a group, and in a group of one: a BatchNorm of its own") {
  check_all_good(run_ranks(3, [](const Rank& rank) {
    const auto is_plain = [&](const SyncBatchNormOptions& options) {
      torch::manual_seed(rank.rank());
      SyncBatchNorm layer(options);
      auto reference = plain(options);
      for (int step = 0; step < 2; ++step) {
        const auto rows = at::randn({5, 3, 2});
        RANK_CHECK(bits(layer(rows)) == bits(reference(rows)));
      }
      RANK_CHECK(bits(layer->running_var) == bits(reference->running_var));
      RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 2);
    };
    is_plain(3);
    is_plain(SyncBatchNormOptions(3).momentum(std::nullopt).affine(false));
    start();
    // Ranks 0 and 1 together, rank 2 alone.
    const auto pair = ddp::new_group({0, 1});
    const auto single = ddp::new_group({2});
    if (rank.rank() == 2) {
      is_plain(SyncBatchNormOptions(3).process_group(single));
    } else {
      torch::manual_seed(1);
      const auto all = at::randn({4, 3}).set_requires_grad(true);
      const auto own = all.detach().split(2)[rank.rank()].clone().set_requires_grad(true);
      SyncBatchNorm layer(SyncBatchNormOptions(3).process_group(pair));
      const auto output = layer(own);
      const auto expected = plain(3)(all);
      output.pow(3).sum().backward();
      expected.pow(3).sum().backward();
      RANK_CHECK(near(output, expected.split(2)[rank.rank()], 1e-6));
      RANK_CHECK(near(own.grad(), all.grad().split(2)[rank.rank()], 1e-5));
    }
    ddp::barrier();
    ddp::destroy_process_group();
  }));
}
