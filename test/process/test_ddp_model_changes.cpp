#include <filesystem>
#include <test/process/models.h>
#include <test/support/catch2.h>
#include <unistd.h>

#include <torch/serialize.h>

// DistributedDataParallel on forked ranks over Gloo: what is loaded into the model, or changed in
// it, after it was wrapped.

using ddp::test::bits_of_all;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::scalar_layer;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

struct NormedImpl : torch::nn::Module {
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(2, 3));
  torch::nn::BatchNorm1d bn = register_module("bn", torch::nn::BatchNorm1d(3));
  at::Tensor forward(const at::Tensor& x) { return bn(fc(x)); }
};
TORCH_MODULE(Normed);

template <class Model>
void step(Model& model, const Rank& rank) {
  model->zero_grad();
  const auto x = at::sin(at::arange(8, at::kFloat).view({4, 2}) + rank.rank());
  model->forward(x).pow(3).sum().backward();
  torch::optim::SGD(model->parameters(), 0.1).step();
}

template <class Model>
std::string state(const Model& model) {
  return bits_of_all(model->parameters()) + "|" + bits_of_all(model->buffers());
}

/// The text of the UsageError that `act` throws, or "(accepted)".
std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const ddp::UsageError& error) {
    return error.what();
  }
  return "(accepted)";
}

/// A path of this test's own; removed at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("ddp_" + name + "_" + std::to_string(getpid()))) {}
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("C19: checkpoints of the inner module and of the wrapper; a step after loading") {
  const TemporaryFile inner("inner");
  const TemporaryFile wrapper("wrapper");
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    Normed net;
    ddp::DistributedDataParallel model(net);
    for (int i = 0; i < 3; ++i) {
      step(model, rank);
    }
    if (rank.rank() == 0) {
      torch::save(net, inner.path());
      torch::save(model, wrapper.path());
    }
    ddp::broadcast(net->bn->running_mean, 0);
    ddp::broadcast(net->bn->running_var, 0);
    ddp::barrier();
    const auto saved = state(net);
    Normed plain;
    torch::load(plain, inner.path());
    RANK_CHECK(state(plain) == saved);
    Normed other;
    ddp::DistributedDataParallel wrapped(other);
    torch::load(wrapped, wrapper.path());
    RANK_CHECK(state(other) == saved);
    // Never a silent partial load.
    Normed fresh;
    bool thrown = false;
    try {
      torch::load(fresh, wrapper.path());
    } catch (const c10::Error&) {
      thrown = true;
    }
    RANK_CHECK(thrown || state(fresh) == saved);
    step(wrapped, rank);
    step(model, rank);
    rank.report("loaded", bits_of_all(other->parameters()));
    rank.report("original", bits_of_all(net->parameters()));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["loaded"] == results[0]["loaded"]);
    CHECK(result["loaded"] == result["original"]);
  }
}

TEST_CASE("loading into a wrapped model keeps the gradients averages, whichever side is loaded") {
  const bool through_wrapper = GENERATE(false, true);
  const bool after_a_step = GENERATE(false, true);
  const TemporaryFile file("loaded");
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    auto net = scalar_layer();
    ddp::DistributedDataParallel model(net);
    if (rank.rank() == 0) {
      through_wrapper ? torch::save(model, file.path()) : torch::save(net, file.path());
    }
    ddp::barrier();
    for (int i = 0; i < 3; ++i) {
      if (i == (after_a_step ? 1 : 0)) {
        through_wrapper ? torch::load(model, file.path()) : torch::load(net, file.path());
      }
      model->zero_grad();
      model(scalar_input(rank)).sum().backward();
      RANK_CHECK(net->weight.grad().item<float>() == 1.5F);
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "a parameter of another dtype or shape than when wrapped is an error at the next forward") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net);
    const auto train = [&](at::ScalarType dtype) {
      model(scalar_input(rank).to(dtype)).sum().backward();
    };
    train(at::kFloat);
    model->to(torch::kDouble);
    rank.report("dtype", refusal([&] { train(at::kDouble); }));
    model->to(torch::kFloat);
    net->zero_grad();
    train(at::kFloat);
    RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
    net->b->weight.set_data(at::ones({2, 1}));
    rank.report("shape", refusal([&] { train(at::kFloat); }));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["dtype"], contains("parameter a.weight was Float of shape [1, 1] on cpu") &&
                                    contains("is Double of shape [1, 1]"));
    CHECK_THAT(result["shape"], contains("b.weight") && contains("[2, 1]"));
  }
}

TEST_CASE("a parameter unfrozen or registered after wrapping is an error that names it") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    net->b->weight.set_requires_grad(false);
    ddp::DistributedDataParallel model(net);
    const auto train = [&] { model(scalar_input(rank)).sum().backward(); };
    train();
    net->b->weight.set_requires_grad(true);
    rank.report("unfrozen", refusal(train));
    net->b->weight.set_requires_grad(false);
    train();
    net->register_module("c", scalar_layer());
    rank.report("module", refusal(train));
    net->unregister_module("c");
    train();
    net->a->register_parameter("extra", at::ones({1}));
    rank.report("parameter", refusal(train));
    // Wrapped again, everything counts.
    net->b->weight.set_requires_grad(true);
    ddp::DistributedDataParallel again(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(true));
    net->zero_grad();
    again(scalar_input(rank)).sum().backward();
    RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["unfrozen"], contains("parameter b.weight was frozen when"));
    CHECK_THAT(result["module"], contains("parameter c.weight was registered after"));
    CHECK_THAT(result["parameter"], contains("parameter a.extra was registered after"));
  }
}

TEST_CASE("frozen parameters and options that differ between ranks are an error on every rank") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    const bool odd = rank.rank() == 1;
    const auto wrap = [](const torch::nn::Linear& layer,
                         const ddp::DistributedDataParallelOptions& options = {}) {
      return refusal([&] { ddp::DistributedDataParallel model(layer, options); });
    };
    torch::nn::Linear shapes(2, 2);
    shapes->register_module("frozen", torch::nn::Linear(2, odd ? 3 : 2));
    for (auto& parameter : shapes->children().front()->parameters()) {
      parameter.set_requires_grad(false);
    }
    rank.report("shape", wrap(shapes));
    torch::nn::Linear frozen(2, 2);
    frozen->bias.set_requires_grad(odd);
    rank.report("frozen", wrap(frozen));
    const auto options = [] { return ddp::DistributedDataParallelOptions(); };
    torch::nn::Linear plain(2, 2);
    rank.report("unused", wrap(plain, options().find_unused_parameters(odd)));
    rank.report("buffers", wrap(plain, options().broadcast_buffers(odd)));
    rank.report("sync", wrap(plain, options().init_sync(odd)));
    rank.report("cap", wrap(plain, odd ? options().bucket_cap_mb(3) : options()));
    // What is ignored is left alone.
    torch::nn::Linear ignoring(2, 2);
    ignoring->register_buffer("k", at::zeros({odd ? 2 : 1}));
    RANK_CHECK(wrap(ignoring, options().ignored_parameters({"k"})) == "(accepted)");
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["shape"], contains("frozen parameter frozen.weight: shape [3, 2]"));
    CHECK_THAT(result["frozen"],
               contains("The first difference: rank 0 has frozen parameter bias") &&
                   contains("rank 1 has parameter bias"));
    CHECK_THAT(result["unused"], contains("find_unused_parameters=true"));
    CHECK_THAT(result["buffers"], contains("broadcast_buffers=false"));
    CHECK_THAT(result["sync"], contains("init_sync=true"));
    CHECK_THAT(result["cap"], contains("bucket_cap_mb=3"));
  }
}

TEST_CASE("a backward through the inner module is reduced, from the start and later") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto net = scalar_layer();
    ddp::DistributedDataParallel model(net);
    for (int i = 0; i < 4; ++i) {
      model->zero_grad();
      const auto x = scalar_input(rank);
      (i % 2 == 0 ? net(x) : model(x)).sum().backward();
      RANK_CHECK(net->weight.grad().item<float>() == 1.5F);
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
