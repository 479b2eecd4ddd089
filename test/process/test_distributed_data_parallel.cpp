#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>

#include <ddp/ddp.h>

// DistributedDataParallel on forked ranks over real Gloo.

using ddp::test::Rank;
using ddp::test::RankOptions;
using ddp::test::run_ranks;
using ddp::test::summary;
using std::chrono::milliseconds;

namespace {

void start(std::chrono::seconds timeout = std::chrono::seconds(15)) {
  ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(timeout));
}

/// The rows (1,0), (0,1), (1,1), (2,-1).
at::Tensor four_rows() {
  return at::tensor({1.0F, 0.0F, 0.0F, 1.0F, 1.0F, 1.0F, 2.0F, -1.0F}).view({4, 2});
}

at::Tensor own_rows(const at::Tensor& rows, const Rank& rank) {
  return rows.chunk(rank.world_size())[rank.rank()].clone();
}

/// The bits of a tensor, for comparison between ranks.
std::string bits(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous().cpu();
  std::string text;
  const auto* bytes = static_cast<const unsigned char*>(dense.data_ptr());
  for (std::size_t i = 0; i < dense.nbytes(); ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

std::string bits_of_all(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += bits(tensor) + ",";
  }
  return text;
}

void set_values(const at::Tensor& parameter, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  parameter.copy_(values.view_as(parameter));
}

torch::nn::Linear scalar_layer() {
  torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
  set_values(layer->weight, at::tensor({1.0F}));
  return layer;
}

/// Two layers of one weight each; the forward uses what it is told.
struct TwoImpl : torch::nn::Module {
  torch::nn::Linear a = register_module("a", scalar_layer());
  torch::nn::Linear b = register_module("b", scalar_layer());
  at::Tensor forward(const at::Tensor& x, bool use_a = true, bool use_b = true) {
    auto sum = at::zeros_like(x);
    if (use_a) {
      sum = sum + a(x);
    }
    if (use_b) {
      sum = sum + b(x);
    }
    return sum;
  }
};
TORCH_MODULE(Two);

at::Tensor scalar_input(const Rank& rank) { return at::full({1, 1}, rank.rank() + 1.0F); }

/// Identity whose backward throws on one rank.
struct ThrowOnRank : torch::autograd::Function<ThrowOnRank> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            bool throws) {
    context->saved_data["throws"] = throws;
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (context->saved_data["throws"].toBool()) {
      throw std::domain_error("a fault of this rank's own");
    }
    return {gradients.front(), at::Tensor()};
  }
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

TEST_CASE("C13: models with different parameters are an error on every rank") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    torch::nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(rank.rank() != 1));
    ddp::DistributedDataParallel model(layer);
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error,
               contains("rank 0 has 2 parameters") && contains("rank 1 has 1 parameters"));
    CHECK(result.seconds < 20);
  }
}

TEST_CASE(
    "different shapes, dtypes, layouts and buffers are an error on every rank, and the group stays "
    "usable") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    const bool odd = rank.rank() == 1;
    const auto refused = [&](const torch::nn::Linear& layer, const char* text) {
      try {
        ddp::DistributedDataParallel model(layer);
      } catch (const ddp::UsageError& error) {
        return std::string(error.what()).find(text) != std::string::npos;
      }
      return false;
    };
    RANK_CHECK(refused(torch::nn::Linear(2, odd ? 3 : 2), "shape [3, 2]"));
    torch::nn::Linear doubles(2, 2);
    if (odd) {
      doubles->to(torch::kDouble);
    }
    RANK_CHECK(refused(doubles, "Double"));
    torch::nn::Linear transposed(2, 2);
    if (odd) {
      transposed->weight.set_data(transposed->weight.detach().t());
    }
    RANK_CHECK(refused(transposed, "strides [1, 2]"));
    torch::nn::Linear buffered(2, 2);
    buffered->register_buffer("k", at::zeros({odd ? 2 : 1}));
    RANK_CHECK(refused(buffered, "buffer k"));
    ddp::barrier();
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "C11: a module without a trainable parameter is refused on every rank; a frozen part is left "
    "alone") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Linear frozen(2, 2);
    frozen->weight.set_requires_grad(false);
    frozen->bias.set_requires_grad(false);
    bool refused = false;
    try {
      ddp::DistributedDataParallel model(frozen);
    } catch (const ddp::UsageError& error) {
      refused = std::string(error.what()).find("no parameter of the module requires a gradient") !=
                std::string::npos;
    }
    RANK_CHECK(refused);
    torch::nn::Linear half(1, 1);
    half->weight.set_requires_grad(false);
    ddp::DistributedDataParallel model(half);
    (model(scalar_input(rank)) * (rank.rank() + 1)).sum().backward();
    RANK_CHECK(half->bias.grad().item<float>() == 1.5F);
    RANK_CHECK(!half->weight.grad().defined());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
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

namespace {

/// Identity whose backward runs a function.
struct InBackward : torch::autograd::Function<InBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            std::function<void()>* act) {
    context->saved_data["act"] = reinterpret_cast<std::int64_t>(act);
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["act"].toInt()))();
    return {gradients.front(), at::Tensor()};
  }
};

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

TEST_CASE(
    "an exception in one rank's backward, caught there: its peers end in seconds, with its words") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    for (int step = 0; step < 3; ++step) {
      const auto x = scalar_input(rank);
      const auto hidden = net->a(x);
      const bool throws = step == 2 && rank.rank() == 1;
      model(x, false, true);  // decides that the backward synchronises
      try {
        net->b(ThrowOnRank::apply(hidden, throws)).sum().backward();
      } catch (const std::domain_error&) {
        // The erring process stays alive; its next step is refused.
        bool refused = false;
        try {
          model(x);
        } catch (const ddp::CommunicationError&) {
          refused = true;
        }
        RANK_CHECK(refused);
        std::this_thread::sleep_for(std::chrono::seconds(8));
        return;
      }
    }
  });
  INFO(summary(results));
  CHECK(results[1].status == 0);
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error,
               contains("rank 1") && contains("an exception ended its backward pass"));
    CHECK(results[rank].seconds < 8);
  }
}

TEST_CASE("an exception in every rank's backward: the next step is clean") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    for (int step = 0; step < 6; ++step) {
      net->zero_grad(step % 2 == 0);
      const auto x = scalar_input(rank);
      const auto hidden = net->a(x);
      model(x, false, true);
      bool thrown = false;
      try {
        net->b(ThrowOnRank::apply(hidden, step % 3 == 2)).sum().backward();
        RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
        RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
      } catch (const std::domain_error&) {
        thrown = true;
      }
      RANK_CHECK(thrown == (step % 3 == 2));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "a parameter unused on one rank only: that rank's error names it, its peers end in seconds") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net);
    model(scalar_input(rank), true, rank.rank() == 0).sum().backward();
  });
  INFO(summary(results));
  CHECK(results[1].error_type == "UsageError");
  CHECK_THAT(results[1].error, contains("b.weight"));
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error, contains("rank 1 left") && contains("b.weight"));
  CHECK(results[0].seconds < 10);
}

TEST_CASE("a rank killed in the middle of backward: its peers end in seconds and name it") {
  const int victim = GENERATE(1, 0);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    std::function<void()> die = [&] {
      if (rank.rank() == victim) {
        raise(SIGKILL);
      }
    };
    for (int step = 0; step < 3; ++step) {
      const auto x = scalar_input(rank);
      auto hidden = net->a(x);
      if (step == 2) {
        hidden = InBackward::apply(hidden, &die);
      }
      model(x, false, true);
      net->b(hidden).sum().backward();
    }
  });
  INFO(summary(results));
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) {
      CHECK(results[rank].status == 128 + SIGKILL);
      continue;
    }
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("rank " + std::to_string(victim)));
    CHECK(results[rank].seconds < 10);
  }
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
    // C20: one rank alone evaluates through the wrapper.
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

TEST_CASE("ignored parameters and buffers are left alone; an unknown name is refused") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    net->register_buffer("k", at::full({1}, rank.rank() * 1.0F));
    net->register_buffer("l", at::full({1}, rank.rank() * 1.0F));
    set_values(net->b->weight, at::full({1}, 5.0F + rank.rank()));
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().ignored_parameters({"b.weight", "k"}));
    model(scalar_input(rank)).sum().backward();
    RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
    RANK_CHECK(net->b->weight.item<float>() == 5.0F + rank.rank());
    RANK_CHECK(net->b->weight.grad().item<float>() == rank.rank() + 1.0F);
    RANK_CHECK(net->named_buffers()["k"].item<float>() == rank.rank() * 1.0F);
    RANK_CHECK(net->named_buffers()["l"].item<float>() == 0.0F);
    bool refused = false;
    try {
      ddp::DistributedDataParallel other(
          net, ddp::DistributedDataParallelOptions().ignored_parameters({"c.weight"}));
    } catch (const ddp::UsageError& error) {
      refused = std::string(error.what()).find("c.weight") != std::string::npos;
    }
    RANK_CHECK(refused);
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

TEST_CASE("any forward: a struct, a tuple, a Sequential's own result type, several arguments") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    // C14: the outputs in a struct, with a layer that is never called.
    struct Output {
      at::Tensor logits;
      at::Tensor aux;
      std::vector<at::Tensor> others;
    };
    struct HeadsImpl : torch::nn::Module {
      static torch::nn::Linear matrix(std::vector<float> values) {
        torch::nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
        set_values(layer->weight, at::tensor(values));
        return layer;
      }
      torch::nn::Linear trunk = register_module("trunk", matrix({1, 2, 0, 1}));
      torch::nn::Linear logits = register_module("logits", matrix({1, 0, 0, 1}));
      torch::nn::Linear aux = register_module("aux", matrix({1, 1, 1, -1}));
      torch::nn::Linear spare = register_module("spare", matrix({2, 0, 0, 2}));
      Output forward(const at::Tensor& x) {
        const auto hidden = trunk(x);
        return {logits(hidden), aux(hidden), {hidden}};
      }
    };
    const auto net = std::make_shared<HeadsImpl>();
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const Output output = model(own_rows(four_rows(), rank));
      (output.logits.sum(1) + output.aux.pow(2).sum(1)).mean().backward();
      const auto is = [](const torch::nn::Linear& layer, std::vector<float> values) {
        return at::allclose(layer->weight.grad(), at::tensor(values).view({2, 2}), 0, 1e-5);
      };
      RANK_CHECK(is(net->trunk, {5, 5.25F, 0, 3.25F}));
      RANK_CHECK(is(net->logits, {1.5F, .25F, 1.5F, .25F}));
      RANK_CHECK(is(net->aux, {9.5F, 4, 4.5F, 1}));
      RANK_CHECK(!net->spare->weight.grad().defined());
    }
    // C15: a recurrent layer's tuple, from a Sequential.
    using Lstm = std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>;
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(2, 3).batch_first(true));
    int number = 0;
    for (const auto& parameter : lstm->parameters()) {
      set_values(parameter,
                 (at::arange(parameter.numel(), at::kFloat).fmod(7) - 3) / 10 + 0.01 * number++);
    }
    torch::nn::Sequential sequence(lstm);
    ddp::DistributedDataParallel recurrent(sequence);
    const auto rows = own_rows(four_rows(), rank);
    const auto input = at::stack({rows, rows / 2, -rows}, 1);
    const auto [output, state] = recurrent->forward<Lstm>(input);
    (output.pow(2).sum({1, 2}) + std::get<1>(state).sum(at::IntArrayRef({0, 2}))).mean().backward();
    const std::vector<double> norms{0.5548173, 0.2571962, 1.0100263, 1.0100263};
    for (std::size_t i = 0; i < norms.size(); ++i) {
      RANK_CHECK(std::abs(lstm->parameters()[i].grad().norm().item<double>() - norms[i]) < 1e-5);
    }
    bool refused = false;
    try {
      recurrent(input);
    } catch (const c10::Error&) {
      refused = true;
    }
    RANK_CHECK(refused);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("the wrapper is a module: names, a member, saving") {
  const auto results = run_ranks(1, [](const Rank& /*rank*/) {
    start();
    Two net;
    struct TrainerImpl : torch::nn::Module {
      ddp::DistributedDataParallel<Two> model{nullptr};
    };
    TrainerImpl trainer;
    trainer.model = ddp::DistributedDataParallel(net);
    trainer.register_module("model", trainer.model);
    RANK_CHECK(trainer.model->named_parameters().contains("module.a.weight"));
    RANK_CHECK(trainer.named_parameters().contains("model.module.b.weight"));
    RANK_CHECK(trainer.model->module() == net.ptr());
    trainer.eval();
    RANK_CHECK(!net->is_training());
    ddp::DistributedDataParallel<TwoImpl> other(net.ptr());
    RANK_CHECK(other->module() == net.ptr());
    bool refused = false;
    try {
      ddp::DistributedDataParallel model(net,
                                         ddp::DistributedDataParallelOptions().bucket_cap_mb(0));
    } catch (const ddp::UsageError& error) {
      refused = std::string(error.what()).find("bucket_cap_mb") != std::string::npos;
    }
    RANK_CHECK(refused);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
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
