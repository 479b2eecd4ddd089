#include <test/process/models.h>
#include <test/support/catch2.h>
#include <thread>

#include <torch/csrc/autograd/autograd.h>

#include <ddp/reducer/reducer.h>

// DistributedDataParallel on forked ranks over Gloo: the values of gradients, and when they come.

using ddp::test::bits;
using ddp::test::bits_of_all;
using ddp::test::four_rows;
using ddp::test::InBackward;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::scalar_layer;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

/// Hands every call to a real group, and keeps the all-reduces' works.
class Recorder : public c10d::ProcessGroup {
 public:
  explicit Recorder(ddp::ProcessGroup inner)
      : c10d::ProcessGroup(inner->getStore(), inner->getRank(), inner->getSize()),
        inner_(std::move(inner)) {
    setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
               inner_->getBackend(c10::DeviceType::CPU));
    setGroupName("recorder");
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    works.push_back(inner_->allreduce(tensors, options));
    return works.back();
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;

 private:
  ddp::ProcessGroup inner_;
};

}  // namespace

TEST_CASE("C16: the original module trains, whichever side the optimizer was built from") {
  const bool from_wrapper = GENERATE(false, true);
  const auto targets = at::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F, 8.0F}).view({4, 2});
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    torch::nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
    set_values(layer->weight, at::zeros({4}));
    std::unique_ptr<torch::optim::SGD> optimizer;
    if (!from_wrapper) {
      optimizer = std::make_unique<torch::optim::SGD>(layer->parameters(), 0.1);
    }
    ddp::DistributedDataParallel model(layer);
    if (from_wrapper) {
      optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    }
    for (int step = 0; step < 10; ++step) {
      optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
      const auto errors = model(own_rows(four_rows(), rank)) - own_rows(targets, rank);
      errors.pow(2).sum(1).mean().backward();
      optimizer->step();
    }
    const auto expected = at::tensor({3.352840F, 0.986258F, 4.051944F, 1.401803F}).view({2, 2});
    RANK_CHECK(at::allclose(layer->weight, expected, 0, 1e-5));
    rank.report("weight", bits(layer->weight));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["weight"] == results[1]["weight"]);
}

TEST_CASE("gradients equal the full batch's, and rank 0's values are everyone's from the start") {
  const int world_size = GENERATE(2, 3, 4);
  const auto rows = at::linspace(-1, 1, 24).view({12, 2});
  const auto results = run_ranks(world_size, [&](const Rank& rank) {
    start();
    torch::manual_seed(rank.rank());  // different weights: rank 0's must win
    torch::nn::Sequential net(torch::nn::Linear(2, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
    const auto loss_of = [](const at::Tensor& output) { return output.pow(2).sum(1).mean(); };
    ddp::DistributedDataParallel model(net);
    rank.report("start", bits_of_all(net->parameters()));
    // The reference: the same weights on the full batch, without a wrapper.
    torch::nn::Sequential alone(torch::nn::Linear(2, 5), torch::nn::Tanh(),
                                torch::nn::Linear(5, 3));
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      set_values(alone->parameters()[i], net->parameters()[i]);
    }
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD reference(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      loss_of(model(own_rows(rows, rank))).backward();
      optimizer.step();
      reference.zero_grad();
      loss_of(alone->forward(rows)).backward();
      reference.step();
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        RANK_CHECK(at::allclose(net->parameters()[i], alone->parameters()[i], 0, 1e-6));
      }
      rank.report("step " + std::to_string(step), bits_of_all(net->parameters()));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result.values == results[0].values);
  }
}

TEST_CASE("the order learned in the first pass is rank 0's on every rank") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      // Rank 0 records a first and b last; the others the other way round.
      const auto x = scalar_input(rank);
      at::Tensor loss;
      if (rank.rank() == 0) {
        const auto first = model(x, true, false);
        loss = first + net->b(x);
      } else {
        const auto first = model(x, false, true);
        loss = first + net->a(x);
      }
      loss.sum().backward();
      RANK_CHECK(net->a->weight.grad().item<float>() == 2.0F);
    }
    RANK_CHECK(model->reducer()->has_rebuilt_buckets());
    for (const auto& bucket : model->reducer()->bucket_assignment()) {
      rank.report("bucket", std::to_string(bucket.front()));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["bucket"] == "0");  // the last one: rank 0's hook for b came first
  }
}

TEST_CASE(
    "overlap is real: bucket 0's all-reduce completes while the first layer's backward still "
    "runs") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Linear first(64, 64);
    torch::nn::Linear second(64, 64);
    struct NetImpl : torch::nn::Module {
      std::function<at::Tensor(const at::Tensor&)> body;
      at::Tensor forward(const at::Tensor& x) { return body(x); }
    };
    const auto net = std::make_shared<NetImpl>();
    net->register_module("first", first);
    net->register_module("second", second);
    const auto recorder = c10::make_intrusive<Recorder>(ddp::default_group());
    int step = 0;
    bool completed_early = false;
    std::function<void()> slow = [&] {
      if (step == 0) {
        return;
      }
      // The first layer's gradients do not exist yet; the wait ends as soon as bucket 0 is reduced,
      // and without overlap never would.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (std::chrono::steady_clock::now() < deadline) {
        if (!recorder->works.empty() && recorder->works.front()->isCompleted()) {
          completed_early = true;
          return;
        }
        std::this_thread::yield();
      }
    };
    // The function object stands before the first layer's use of its weight in backward.
    net->body = [&](const at::Tensor& x) { return second(InBackward::apply(first(x), &slow)); };
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().process_group(recorder).bucket_cap_mb(0.001));
    for (; step < 3; ++step) {
      net->zero_grad();
      recorder->works.clear();
      completed_early = false;
      model(at::ones({2, 64}) * (rank.rank() + 1)).sum().backward();
      RANK_CHECK(completed_early == (step > 0));
    }
    RANK_CHECK(recorder->works.size() >= 2);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("C01: a parameter registered twice is reduced and stepped once") {
  const bool view = GENERATE(false, true);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    struct TiedImpl : torch::nn::Module {
      torch::nn::Linear enc =
          register_module("enc", torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
      torch::nn::Linear dec = register_module("dec", enc);
      at::Tensor forward(const at::Tensor& x) { return dec(at::tanh(enc(x))); }
    };
    const auto net = std::make_shared<TiedImpl>();
    const auto start_values = at::tensor({0.1F, 0.2F, 0.3F, 0.4F}).view({2, 2});
    set_values(net->enc->weight, start_values);
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(view));
    RANK_CHECK(model->parameters().size() == 1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto expected = at::tensor({0.1394973F, 0.1506220F, 0.1983667F, 0.2453696F}).view({2, 2});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model(own_rows(four_rows(), rank)).pow(2).sum(1).mean().backward();
      RANK_CHECK(at::allclose(net->enc->weight.grad(), expected, 0, 1e-6));
    }
    optimizer.step();
    RANK_CHECK(at::allclose(net->enc->weight, start_values - 0.1 * expected, 0, 1e-6));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("C08: zero-size parameters and a model without buffers") {
  const bool view = GENERATE(false, true);
  const double cap = GENERATE(25.0, 1e-6);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    struct SizesImpl : torch::nn::Module {
      at::Tensor e = register_parameter("e", at::empty({0}));
      at::Tensor w = register_parameter("w", at::ones({2}));
      at::Tensor z = register_parameter("z", at::empty({1, 0, 2}));
      at::Tensor forward(const at::Tensor& x) { return (w * x).sum() + e.sum() + z.sum(); }
    };
    const auto net = std::make_shared<SizesImpl>();
    ddp::DistributedDataParallel model(
        net,
        ddp::DistributedDataParallelOptions().gradient_as_bucket_view(view).bucket_cap_mb(cap));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::tensor({1.0F, 2.0F}) * (rank.rank() + 1)).backward();
      RANK_CHECK(at::equal(net->w.grad(), at::tensor({1.5F, 3.0F})));
      RANK_CHECK(net->e.grad().sizes() == net->e.sizes());
      RANK_CHECK(net->z.grad().sizes() == net->z.sizes());
    }
    // Alone in its bucket, where nothing of its dtype has an element.
    struct AloneImpl : torch::nn::Module {
      at::Tensor e = register_parameter("e", at::empty({0}, at::kDouble));
      at::Tensor w = register_parameter("w", at::ones({2}));
      at::Tensor forward(const at::Tensor& x) { return (w * x).sum() + e.sum(); }
    };
    const auto alone = std::make_shared<AloneImpl>();
    ddp::DistributedDataParallel second(
        alone,
        ddp::DistributedDataParallelOptions().gradient_as_bucket_view(view).bucket_cap_mb(cap));
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      second(at::tensor({1.0F, 2.0F}) * (rank.rank() + 1)).backward();
      RANK_CHECK(at::equal(alone->w.grad(), at::tensor({1.5F, 3.0F})));
      RANK_CHECK(alone->e.grad().sizes() == alone->e.sizes());
    }
    RANK_CHECK(second->reducer()->bucket_assignment().size() == 2);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("C06: complex parameters") {
  const bool view = GENERATE(false, true);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    struct ComplexImpl : torch::nn::Module {
      at::Tensor w =
          register_parameter("w", at::full({1}, c10::complex<float>(1, 2), at::kComplexFloat));
      at::Tensor forward(const at::Tensor& x) { return (w * x).abs().pow(2).sum(); }
    };
    const auto net = std::make_shared<ComplexImpl>();
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(view));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = rank.rank() == 0 ? c10::complex<float>(1, 1) : c10::complex<float>(2, -1);
      model(at::full({1}, x, at::kComplexFloat)).backward();
      const auto expected = at::full({1}, c10::complex<float>(7, 14), at::kComplexFloat);
      RANK_CHECK(at::allclose(net->w.grad(), expected, 0, 1e-5));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("the same seed gives the same bits in every run") {
  std::vector<std::string> runs;
  for (int run = 0; run < 2; ++run) {
    const auto results = run_ranks(3, [](const Rank& rank) {
      start();
      torch::manual_seed(1);
      torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                                torch::nn::Linear(16, 4));
      ddp::DistributedDataParallel model(
          net, ddp::DistributedDataParallelOptions().bucket_cap_mb(0.0005));
      torch::optim::SGD optimizer(model->parameters(),
                                  torch::optim::SGDOptions(0.05).momentum(0.9));
      const auto data = at::randn({12, 8});
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        model(own_rows(data, rank)).pow(2).mean().backward();
        optimizer.step();
      }
      rank.report("weights", bits_of_all(net->parameters()));
      ddp::destroy_process_group();
    });
    INFO(summary(results));
    for (const auto& result : results) {
      REQUIRE(result.status == 0);
      CHECK(result["weights"] == results[0]["weights"]);
    }
    runs.push_back(results[0]["weights"]);
  }
  CHECK(runs[0] == runs[1]);
}

TEST_CASE(
    "C07: channels_last weights reach all ranks by logical index, and gradients keep strides") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 3).bias(false));
    const auto values = at::arange(108, at::kFloat).view({4, 3, 3, 3}) / 100;
    set_values(net->weight, rank.rank() == 0 ? values : at::zeros_like(values));
    net->weight.set_data(net->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    ddp::DistributedDataParallel model(net);
    RANK_CHECK(at::equal(net->weight, values));
    RANK_CHECK(net->weight.strides() == at::IntArrayRef({27, 1, 9, 3}));
    const auto input = at::arange(150, at::kFloat).view({2, 3, 5, 5}) / 50 * (rank.rank() + 1);
    model(input.contiguous(at::MemoryFormat::ChannelsLast)).pow(2).mean().backward();
    const auto& gradient = net->weight.grad();
    RANK_CHECK(gradient.strides() == at::IntArrayRef({27, 1, 9, 3}));
    RANK_CHECK(std::abs(gradient.sum().item<double>() / 5614.317 - 1) < 1e-5);
    RANK_CHECK(
        at::allclose(gradient[0][0][0], at::tensor({9.129420F, 9.281857F, 9.434295F}), 1e-5));
    rank.report("gradient", bits(gradient));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["gradient"] == results[1]["gradient"]);

  // Different layouts on the ranks: named on both.
  const auto differ = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 3).bias(false));
    if (rank.rank() == 0) {
      net->weight.set_data(net->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
    ddp::DistributedDataParallel model(net);
  });
  INFO(summary(differ));
  for (const auto& result : differ) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("weight: shape [4, 3, 3, 3], strides [27, 1, 9, 3]") &&
                                 contains("strides [27, 9, 3, 1]"));
  }
}

TEST_CASE("C12: gradients as bucket views, with both modes of zero_grad, kept and set by hand") {
  for (const bool as_view : {true, false}) {
    const auto results = run_ranks(2, [as_view](const Rank& rank) {
      start();
      auto net = scalar_layer();
      ddp::DistributedDataParallel model(
          net, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(as_view));
      torch::optim::SGD optimizer(model->parameters(), 0.0);
      at::Tensor kept;
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad(/*set_to_none=*/step < 5);
        model(scalar_input(rank)).sum().backward();
        RANK_CHECK(net->weight.grad().item<float>() == 1.5F);
        optimizer.step();
        if (step == 2) {
          kept = net->weight.grad();
        }
      }
      // With bucket views it may have been overwritten: by another average.
      RANK_CHECK(kept.item<float>() == 1.5F);
      net->weight.mutable_grad() = at::full({1, 1}, 100.0F);
      model(scalar_input(rank)).sum().backward();
      RANK_CHECK(net->weight.grad().item<float>() == 101.5F);
      RANK_CHECK(as_view || kept.item<float>() == 1.5F);
      ddp::destroy_process_group();
    });
    INFO(summary(results));
    CHECK(results[0].status == 0);
    CHECK(results[1].status == 0);
  }
}

TEST_CASE("second derivatives: a gradient penalty's backward is reduced like any other") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto net = scalar_layer();
    ddp::DistributedDataParallel model(net);
    // loss = (w x)^3; its derivative by x, 3 w^3 x^2, squared, by w: 54 w^5 x^4.
    const auto x = scalar_input(rank).set_requires_grad(true);
    const auto by_x = torch::autograd::grad({model(x).pow(3).sum()}, {x}, {}, /*retain_graph=*/true,
                                            /*create_graph=*/true)
                          .front();
    by_x.pow(2).sum().backward();
    RANK_CHECK(net->weight.grad().item<float>() == 54.0F * (1 + 16) / 2);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
