#include <test/process/models.h>
#include <test/support/catch2.h>

// Communication hooks on forked ranks over Gloo. That they compute what Python's do is test/parity.

using ddp::test::bits;
using ddp::test::bits_of_all;
using ddp::test::Rank;
using ddp::test::RankResult;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::scalar_layer;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

using MakeHook = std::function<ddp::CommHook()>;

ddp::DistributedDataParallelOptions many_buckets() {
  return ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6);
}

torch::nn::Sequential perceptron() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(12, 24), torch::nn::ReLU(),
                               torch::nn::Linear(24, 24), torch::nn::ReLU(),
                               torch::nn::Linear(24, 24), torch::nn::Linear(24, 3));
}

/// The gradients of `steps` steps on batches of the rank's own, all parameters in many buckets or
/// in one.
std::vector<at::Tensor> gradients_with(const Rank& rank, const MakeHook& make_hook, int steps,
                                       const ddp::DistributedDataParallelOptions& options) {
  auto net = perceptron();
  ddp::DistributedDataParallel model(net, options);
  if (make_hook) {
    model->register_comm_hook(make_hook());
  }
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  torch::manual_seed(100 + rank.rank());
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model->forward(at::randn({8, 12})).square().mean().backward();
    for (const auto& parameter : model->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    optimizer.step();
  }
  return gradients;
}

/// The largest difference over the largest value.
double distance(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double difference = 0;
  double scale = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    difference = std::max(difference, (left[i] - right[i]).abs().max().item<double>());
    scale = std::max(scale, left[i].abs().max().item<double>());
  }
  return difference / scale;
}

void check_equal_ranks(const std::vector<RankResult>& results) {
  INFO(summary(results));
  for (const auto& result : results) {
    REQUIRE(result.status == 0);
    CHECK(result["bits"] == results[0]["bits"]);
  }
}

/// One weight of one element: its gradient with `hook`, where rank r's own is `own(r)`.
at::Tensor reduced_scalar(const Rank& rank, const ddp::CommHook& hook, float own) {
  auto layer = scalar_layer();
  ddp::DistributedDataParallel model(layer);
  model->register_comm_hook(hook);
  model->forward(at::full({1, 1}, own)).sum().backward();
  RANK_CHECK(rank.world_size() == 2);
  return layer->weight.grad().clone();
}

}  // namespace

TEST_CASE("comm hook allreduce: the bits of no hook") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    const auto plain = gradients_with(rank, {}, 3, many_buckets());
    const auto hooked = gradients_with(
        rank, [] { return ddp::comm_hooks::allreduce(); }, 3, many_buckets());
    RANK_CHECK(bits_of_all(plain) == bits_of_all(hooked));
    rank.report("bits", bits_of_all(hooked));
    ddp::destroy_process_group();
  });
  check_equal_ranks(results);
}

TEST_CASE("comm hooks that compress: the gradient is rounded to the precision of the wire") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    using namespace ddp::comm_hooks;
    const float fine = 1.0F + 1.0F / 1024;  // half keeps it, bfloat16 does not
    const float finer = 1.0F + 1.0F / 8192;
    for (const auto& hook : {fp16_compress(), fp16_compress_wrapper(allreduce())}) {
      RANK_CHECK(reduced_scalar(rank, hook, fine).item<float>() == fine);
      RANK_CHECK(reduced_scalar(rank, hook, finer).item<float>() == 1.0F);
      // Rounded before it is divided: 131072 is not a half.
      RANK_CHECK(std::isinf(reduced_scalar(rank, hook, 131072.0F).item<float>()));
    }
    for (const auto& hook : {bf16_compress(), bf16_compress_wrapper(allreduce())}) {
      RANK_CHECK(reduced_scalar(rank, hook, fine).item<float>() == 1.0F);
      RANK_CHECK(reduced_scalar(rank, hook, 131072.0F).item<float>() == 131072.0F);
    }
    RANK_CHECK(reduced_scalar(rank, fp16_compress(), rank.rank() + 1.0F).item<float>() == 1.5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("comm hooks average complex gradients") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    struct ComplexImpl : torch::nn::Module {
      at::Tensor weight = register_parameter("weight", at::ones({2, 3}, at::kComplexFloat));
      at::Tensor forward(const at::Tensor& x) { return at::real(weight * x).sum(); }
    };
    using namespace ddp::comm_hooks;
    const auto power = PowerSGDOptions().start_power_sgd_iter(2);
    for (const auto& hook :
         {allreduce(), fp16_compress(), bf16_compress(), fp16_compress_wrapper(allreduce()),
          power_sgd(power), batched_power_sgd(power)}) {
      auto net = std::make_shared<ComplexImpl>();
      ddp::DistributedDataParallel model(net);
      model->register_comm_hook(hook);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model->forward(at::full({2, 3}, c10::complex<float>(1, 2 + 4 * rank.rank()))).backward();
        RANK_CHECK(at::equal(net->weight.grad(), at::full({2, 3}, c10::complex<float>(1, -4))));
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("a hook written for c10d's reducer: both of its functions are called") {
  struct Native : c10d::CppCommHookInterface<ddp::ProcessGroup> {
    using c10d::CppCommHookInterface<ddp::ProcessGroup>::CppCommHookInterface;
    c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
      std::vector<at::Tensor> tensors{bucket.getBufferRef().mul_(10)};
      return state_->allreduce(tensors)->getFuture();
    }
    at::Tensor parseHookResult(const c10::IValue& result) override {
      return c10d::CppCommHookInterface<ddp::ProcessGroup>::parseHookResult(result) + 1;
    }
  };
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto layer = scalar_layer();
    ddp::DistributedDataParallel model(layer);
    model->register_comm_hook(std::make_unique<Native>(ddp::default_group()));
    model->forward(scalar_input(rank)).sum().backward();
    RANK_CHECK(layer->weight.grad().item<float>() == 31.0F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("hooks of several steps keep their buckets apart: many buckets, equal ranks") {
  // Bits of few buckets and of many are the same where a gradient is compressed on its own.
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    using namespace ddp::comm_hooks;
    const auto options = PowerSGDOptions().matrix_approximation_rank(2).start_power_sgd_iter(2);
    const std::vector<MakeHook> hooks{
        [&] { return power_sgd(options); },
        [&] { return batched_power_sgd(options); },
        [&] { return power_sgd(PowerSGDOptions(options).warm_start(false)); },
        [&] { return power_sgd(PowerSGDOptions(options).batch_tensors_with_same_shape(true)); },
        [&] { return fp16_compress_wrapper(power_sgd(options)); },
        [] { return quantization_per_tensor(); },
        [] { return quantization_per_channel(); },
    };
    std::string all;
    for (const auto& hook : hooks) {
      for (const bool find_unused : {false, true}) {
        const auto gradients =
            gradients_with(rank, hook, 12, many_buckets().find_unused_parameters(find_unused));
        for (const auto& gradient : gradients) {
          RANK_CHECK(at::isfinite(gradient).all().item<bool>());
        }
        all += bits_of_all(gradients);
      }
    }
    rank.report("bits", std::to_string(std::hash<std::string>()(all)));
    ddp::destroy_process_group();
  });
  check_equal_ranks(results);
}

TEST_CASE("PowerSGD is the plain average before its start and of what has its rank, not of more") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    using namespace ddp::comm_hooks;
    const auto options = PowerSGDOptions().matrix_approximation_rank(1).start_power_sgd_iter(3);
    for (const bool batched : {false, true}) {
      // 8 x 8 with one column of input: the gradient of a batch of one is of rank 1.
      torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
      set_values(layer->weight, at::arange(64).to(at::kFloat) / 64);
      ddp::DistributedDataParallel model(layer);
      model->register_comm_hook(batched ? batched_power_sgd(options) : power_sgd(options));
      const auto x = at::arange(1, 9).to(at::kFloat).view({1, 8});
      const auto run = [&](const at::Tensor& input) {
        layer->zero_grad();
        (model->forward(input) * at::arange(2, 10)).sum().backward();
        return layer->weight.grad().clone();
      };
      const auto outer = at::arange(2, 10).to(at::kFloat).view({8, 1}) * x;
      for (int step = 0; step < 6; ++step) {
        // Ranks have the same directions and other lengths: the average is of rank 1.
        const auto gradient = run(x * (rank.rank() + 1));
        RANK_CHECK(at::allclose(gradient, 1.5 * outer, 1e-4, 1e-4));
        RANK_CHECK(step >= 3 || at::equal(gradient, 1.5 * outer));
      }
      // Two directions on two ranks: rank 1 loses something, and error feedback brings it back.
      const auto other = rank.rank() == 0 ? x : x.flip({1});
      auto sum = at::zeros({8, 8});
      at::Tensor first;
      for (int step = 0; step < 40; ++step) {
        layer->zero_grad();
        const auto weights = rank.rank() == 0 ? at::arange(2, 10) : at::arange(2, 10).flip({0});
        (model->forward(other) * weights).sum().backward();
        first = first.defined() ? first : layer->weight.grad().clone();
        sum += layer->weight.grad();
      }
      const auto expected = (outer + outer.flip({0, 1})) / 2;
      RANK_CHECK(!at::allclose(first, expected, 1e-2, 1e-2));
      RANK_CHECK(at::allclose(sum / 40, expected, 0.1, 0.1 * expected.max().item<double>()));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("PowerSGD on gradients of zeros, on scalars and on empty parameters: finite") {
  const auto results = run_ranks(2, [](const Rank& /*rank*/) {
    start();
    struct OddImpl : torch::nn::Module {
      at::Tensor matrix = register_parameter("matrix", at::ones({8, 8}));
      at::Tensor scalar = register_parameter("scalar", at::ones({}));
      at::Tensor empty = register_parameter("empty", at::ones({0, 3}));
      at::Tensor forward(float x) { return (matrix * x).sum() + scalar * x + empty.sum(); }
    };
    using namespace ddp::comm_hooks;
    for (const std::int64_t rank : {1, 3}) {
      const auto options =
          PowerSGDOptions().matrix_approximation_rank(rank).start_power_sgd_iter(2);
      for (const auto& hook : {power_sgd(PowerSGDOptions(options).min_compression_rate(0.5)),
                               batched_power_sgd(options)}) {
        auto net = std::make_shared<OddImpl>();
        ddp::DistributedDataParallel model(net);
        model->register_comm_hook(hook);
        for (int step = 0; step < 6; ++step) {
          net->zero_grad();
          model->forward(step % 2 == 0 ? 0.0F : 1.0F).backward();
          RANK_CHECK(at::isfinite(net->matrix.grad()).all().item<bool>());
          RANK_CHECK(at::isfinite(net->scalar.grad()).all().item<bool>());
          RANK_CHECK(net->empty.grad().numel() == 0);
        }
      }
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("quantised gradients are within a step of the average") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    using namespace ddp::comm_hooks;
    const ddp::DistributedDataParallelOptions options;
    const auto exact = gradients_with(rank, {}, 1, options);
    const auto tensor = gradients_with(
        rank, [] { return quantization_per_tensor(); }, 1, options);
    const auto channels = gradients_with(
        rank,
        [] { return quantization_per_channel(QuantizationPerChannelOptions().channel_size(16)); },
        1, options);
    RANK_CHECK(distance(exact, tensor) > 1e-6);
    RANK_CHECK(distance(exact, tensor) < 0.02);
    RANK_CHECK(distance(exact, channels) < 0.02);
    RANK_CHECK(distance(exact, channels) > 1e-6);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE(
    "post-local SGD: all ranks, then this node's, then all parameters in the averager's steps") {
  const auto results = run_ranks(4, [](const Rank& rank) {
    // Two nodes of two ranks.
    setenv("LOCAL_RANK", std::to_string(rank.rank() % 2).c_str(), 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    start();
    using namespace ddp::comm_hooks;
    for (const bool local_average : {true, false}) {
      auto layer = scalar_layer();
      ddp::DistributedDataParallel model(layer);
      model->register_comm_hook(
          post_local_sgd(PostLocalSGDOptions(2).post_local_gradient_allreduce(local_average)));
      ddp::PeriodicModelAverager averager(ddp::PeriodicModelAveragerOptions(3).warmup_steps(2));
      const float own = rank.rank() + 1.0F;
      const float pair = rank.rank() < 2 ? 1.5F : 3.5F;
      for (int step = 0; step < 9; ++step) {
        layer->zero_grad();
        model->forward(scalar_input(rank)).sum().backward();
        const auto gradient = layer->weight.grad().item<float>();
        RANK_CHECK(gradient == (step < 2 ? 2.5F : local_average ? pair : own));
        set_values(layer->weight, at::tensor({own}));
        averager.average_parameters(model->parameters());
        const bool averages = step == 2 || step == 5 || step == 8;
        RANK_CHECK(layer->weight.item<float>() == (averages ? 2.5F : own));
      }
      RANK_CHECK(averager.step() == 9);
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE("the model averager keeps dtypes and layouts, and leaves alone what has no gradient") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    const auto own = static_cast<float>(rank.rank());
    const auto make = [&](at::ScalarType dtype) {
      auto tensor = at::full({2, 3}, own, at::dtype(dtype)).t().set_requires_grad(true);
      tensor.mutable_grad() = at::zeros_like(tensor);
      return tensor;
    };
    const auto single = make(at::kFloat);
    const auto half = make(at::kHalf);
    const auto complex = make(at::kComplexFloat);
    const auto frozen = at::full({2}, own);
    const auto strides = single.strides().vec();
    const auto* data = single.data_ptr();
    const auto on_rank_1 = make(at::kFloat);
    if (rank.rank() == 0) {
      on_rank_1.mutable_grad().reset();
    }
    ddp::PeriodicModelAverager averager(1);
    averager.average_parameters({single, half, frozen, complex, on_rank_1});
    for (const auto& tensor : {single, half, complex, on_rank_1}) {
      RANK_CHECK(at::real(at::view_as_real(tensor.detach().to(at::kComplexFloat)).select(-1, 0))
                     .eq(0.5)
                     .all()
                     .item<bool>());
    }
    RANK_CHECK(half.scalar_type() == at::kHalf);
    RANK_CHECK(single.strides().vec() == strides && single.data_ptr() == data);
    RANK_CHECK(frozen[0].item<float>() == own);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
