#include <sstream>
#include <test/process/models.h>
#include <test/support/catch2.h>

#include <torch/serialize.h>

// convert_sync_batchnorm, and what SyncBatchNorm has in common with BatchNorm as a module.

using ddp::convert_sync_batchnorm;
using ddp::SyncBatchNorm;
using ddp::SyncBatchNormOptions;
using ddp::test::bits;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm3d;
using torch::nn::BatchNormOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

namespace {

void on_ranks(int world_size, const std::function<void(const Rank&)>& body) {
  const auto results = run_ranks(world_size, [&](const Rank& rank) {
    start();
    body(rank);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

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

/// Names, and the tensors' identities.
std::string state_of(const torch::nn::Module& module) {
  std::ostringstream text;
  for (const auto& entries : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& entry : entries) {
      text << entry.key() << " " << entry.value().unsafeGetTensorImpl() << "\n";
    }
  }
  return text.str();
}

/// LibTorch's own advice for Sequentials in Sequentials.
struct BlockImpl : torch::nn::SequentialImpl {
  using torch::nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Block);

/// A Sequential as a member beside another child, as programs have them.
struct ConvertibleImpl : torch::nn::Module {
  Sequential features = register_module(
      "features",
      Sequential(Linear(4, 4), BatchNorm1d(4),
                 Block(torch::nn::ReLU(), BatchNorm1d(BatchNormOptions(4).affine(false)))));
  Linear head = register_module("head", Linear(4, 2));
  at::Tensor forward(const at::Tensor& x) { return head(features->forward(x)); }
};
TORCH_MODULE(Convertible);

struct TypedImpl : torch::nn::Module {
  Sequential features = register_module("features", Sequential(Linear(4, 4), BatchNorm1d(4)));
  BatchNorm1d norm = register_module("norm", BatchNorm1d(4));
};
TORCH_MODULE(Typed);

struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
  using torch::nn::BatchNorm1dImpl::BatchNorm1dImpl;
};
TORCH_MODULE(OwnNorm);

/// Runs one layer, and knows it twice.
struct MixedImpl : torch::nn::SequentialImpl {
  BatchNorm1d norm = register_module("norm", BatchNorm1d(4));
  MixedImpl() {
    push_back(norm);
    push_back(BatchNorm1d(4));
  }
};
TORCH_MODULE(Mixed);

struct ManyImpl : torch::nn::Module {
  Typed typed = register_module("typed", Typed());
  Sequential net = register_module("net", Sequential(Linear(4, 4), BatchNorm1d(4), OwnNorm(4)));
  torch::nn::ModuleList list = register_module(
      "list", torch::nn::ModuleList(BatchNorm2d(4), Sequential(Linear(4, 4), BatchNorm1d(4))));
  torch::nn::ModuleDict dict = register_module("dict", torch::nn::ModuleDict());
  Mixed mixed = register_module("mixed", Mixed());
  ManyImpl() {
    dict->update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
        {"bn", BatchNorm3d(4).ptr()}});
  }
};
TORCH_MODULE(Many);

}  // namespace

TEST_CASE("convert_sync_batchnorm: a BatchNorm itself, of each dimension") {
  on_ranks(2, [](const Rank& rank) {
    const auto check = [&](auto norm, const at::Tensor& full) {
      norm->to(at::kDouble);
      set_values(norm->weight, at::tensor({0.5, 2.0}, at::kDouble));
      norm->bias.set_requires_grad(false);
      const auto state = state_of(*norm);
      const SyncBatchNorm converted = convert_sync_batchnorm(norm);
      RANK_CHECK(state_of(*converted) == state);
      RANK_CHECK(converted->options.eps() == 1e-3 && !converted->options.momentum());
      RANK_CHECK(!converted->bias.requires_grad() && converted->is_training());
      auto reference =
          std::dynamic_pointer_cast<typename decltype(norm)::ContainedType>(norm->clone());
      const auto expected = reference->forward(full);
      RANK_CHECK(
          at::allclose(SyncBatchNorm(converted)(own_rows(full, rank)), own_rows(expected, rank)));
      RANK_CHECK(at::allclose(norm->running_var, reference->running_var));
      norm->eval();
      RANK_CHECK(!convert_sync_batchnorm(norm)->is_training());
      std::shared_ptr<torch::nn::Module> base = norm.ptr();
      RANK_CHECK(convert_sync_batchnorm(base)->template as<SyncBatchNorm>() != nullptr);
      RANK_CHECK(state_of(*convert_sync_batchnorm(norm.ptr())) == state);
    };
    torch::manual_seed(2);
    const auto options = BatchNormOptions(2).eps(1e-3).momentum(std::nullopt);
    check(BatchNorm1d(options), at::randn({4, 2}, at::kDouble));
    check(BatchNorm2d(options), at::randn({4, 2, 3, 2}, at::kDouble));
    check(BatchNorm3d(options), at::randn({4, 2, 3, 2, 2}, at::kDouble));
  });
}

TEST_CASE("convert_sync_batchnorm: Sequentials within a module, in place") {
  on_ranks(2, [](const Rank& rank) {
    torch::manual_seed(4);
    Convertible reference;
    torch::manual_seed(4);
    Convertible net;
    for (const auto& model : {reference, net}) {
      model->features->ptr(2)->eval();
    }
    const auto state = state_of(*net);
    auto* const features = net->features.get();
    const Convertible same = convert_sync_batchnorm(net);
    RANK_CHECK(same.ptr() == net.ptr() && net->features.get() == features);
    RANK_CHECK(state_of(*net) == state);
    std::ostringstream text;
    text << *net;
    RANK_CHECK(has(text.str(),
                   "ddp::SyncBatchNorm(4, eps=1e-05, momentum=0.1, affine=true, "
                   "track_running_stats=true)"));
    RANK_CHECK(!has(text.str(), "torch::nn::BatchNorm"));
    auto& first = net->features->at<ddp::SyncBatchNormImpl>(1);
    auto& second = net->features->at<BlockImpl>(2).at<ddp::SyncBatchNormImpl>(1);
    RANK_CHECK(first.is_training() && !second.is_training() && !second.options.affine());
    // What runs is what is registered: the ranks' statistics, and modes reach it.
    const auto full = at::randn({6, 4});
    const auto output = net->forward(own_rows(full, rank));
    RANK_CHECK(at::allclose(output, own_rows(reference->forward(full), rank), 1e-5, 1e-6));
    net->eval();
    if (rank.rank() == 0) {
      net->forward(at::ones({1, 4}));
    }
    RANK_CHECK(first.num_batches_tracked.item<std::int64_t>() == 1);
    // Again: nothing is left to convert.
    convert_sync_batchnorm(net);
    RANK_CHECK(&net->features->at<ddp::SyncBatchNormImpl>(1) == &first);
    ddp::barrier();
  });
}

TEST_CASE("convert_sync_batchnorm: one layer in two places stays one, groups are kept") {
  on_ranks(2, [](const Rank& /*rank*/) {
    const auto pair = ddp::new_group({});
    BatchNorm1d shared(4);
    Sequential net({{"first", torch::nn::AnyModule(shared)},
                    {"linear", torch::nn::AnyModule(Linear(4, 4))},
                    {"again", torch::nn::AnyModule(shared)},
                    {"own", torch::nn::AnyModule(SyncBatchNorm(4))}});
    const auto names = net->named_children().keys();
    const Sequential converted = convert_sync_batchnorm(net, pair);
    RANK_CHECK(converted.ptr() == net.ptr() && net->named_children().keys() == names);
    RANK_CHECK(net->ptr(0) == net->ptr(2));
    RANK_CHECK(net->ptr(0) == net->named_children()["first"]);
    RANK_CHECK(net->at<ddp::SyncBatchNormImpl>(0).options.process_group() == pair);
    RANK_CHECK(!net->at<ddp::SyncBatchNormImpl>(3).options.process_group());
    net->forward(at::randn({3, 4}));
    RANK_CHECK(shared->num_batches_tracked.item<std::int64_t>() == 2);
    // A copy keeps the group and has tensors of its own.
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    RANK_CHECK(copy->at<ddp::SyncBatchNormImpl>(0).options.process_group() == pair);
    copy->forward(at::randn({3, 4}));
    RANK_CHECK(shared->num_batches_tracked.item<std::int64_t>() == 2);
  });
}

TEST_CASE("convert_sync_batchnorm: what cannot be replaced is named, and nothing is changed") {
  on_ranks(2, [](const Rank& rank) {
    const auto norm_of = [](Sequential& net) {
      return net->ptr(1)->as<torch::nn::BatchNorm1dImpl>() != nullptr;
    };
    Typed net;
    auto text = refusal([&] { convert_sync_batchnorm(net); });
    RANK_CHECK(has(text,
                   "convert_sync_batchnorm: expected batch norms that stand directly in a "
                   "torch::nn::Sequential; found 1 ") &&
               has(text, "norm (torch::nn::BatchNorm1dImpl, in "));
    RANK_CHECK(has(text, "TypedImpl") && has(text, "Declare each as ddp::SyncBatchNorm"));
    RANK_CHECK(!has(text, "features.1") && norm_of(net->features));

    Many many;
    text = refusal([&] { convert_sync_batchnorm(many); });
    for (const auto* name : {"typed.norm (", "net.2 (", "list.0 (torch::nn::BatchNorm2dImpl",
                             "dict.bn (", "mixed.0 ("}) {
      RANK_CHECK(has(text, name));
    }
    RANK_CHECK(has(text, "found 5 ") && norm_of(many->net) && norm_of(many->typed->features));

    // Sequentials in lists are Sequentials.
    torch::nn::ModuleList list(Sequential(Linear(4, 4), BatchNorm1d(4)));
    convert_sync_batchnorm(list);
    RANK_CHECK(list->ptr(0)->as<Sequential>()->ptr(1)->as<SyncBatchNorm>() != nullptr);

    // Registered, and not what the Sequential runs.
    Sequential replaced(BatchNorm1d(4));
    replaced->replace_module("0", BatchNorm1d(4));
    RANK_CHECK(has(refusal([&] { convert_sync_batchnorm(replaced); }), "found 1 "));

    RANK_CHECK(has(
        refusal([] { convert_sync_batchnorm(OwnNorm(4)); }),
        "convert_sync_batchnorm: expected a torch::nn::BatchNorm or a module with some; found a"));
    RANK_CHECK(has(refusal([] { convert_sync_batchnorm(Linear(nullptr)); }),
                   "convert_sync_batchnorm: the module is empty"));
    const auto other = ddp::new_group({1 - rank.rank()});
    RANK_CHECK(
        has(refusal([&] { convert_sync_batchnorm(BatchNorm1d(4), other); }), "not a member"));
  });
}

TEST_CASE("a converted model trains under DistributedDataParallel") {
  on_ranks(2, [](const Rank& rank) {
    torch::manual_seed(6);
    Convertible net;
    torch::manual_seed(6);
    Convertible reference;
    ddp::DistributedDataParallel model(convert_sync_batchnorm(net));
    const auto full = at::randn({6, 4});
    model->forward(own_rows(full, rank)).square().mean().backward();
    reference->forward(full).square().mean().backward();
    RANK_CHECK(at::allclose(net->features->parameters()[0].grad(),
                            reference->features->parameters()[0].grad(), 1e-4, 1e-6));
    RANK_CHECK(at::allclose(net->head->weight.grad(), reference->head->weight.grad(), 1e-4, 1e-6));
  });
}

TEST_CASE("checkpoints go from BatchNorm to SyncBatchNorm and back") {
  on_ranks(1, [](const Rank& /*rank*/) {
    const auto names = [](const torch::nn::Module& module) {
      auto all = module.named_parameters().keys();
      for (const auto& name : module.named_buffers().keys()) {
        all.push_back(name);
      }
      return all;
    };
    for (const bool affine : {true, false}) {
      const auto options = BatchNormOptions(3).affine(affine);
      BatchNorm2d plain(options);
      SyncBatchNorm layer(options);
      RANK_CHECK(names(*plain) == names(*layer));
      plain(at::randn({4, 3, 2, 2}));
      if (affine) {
        set_values(plain->weight, at::randn({3}));
      }
      const auto through = [](const auto& from, auto& to) {
        std::stringstream file;
        torch::save(from, file);
        torch::load(to, file);
      };
      through(plain, layer);
      RANK_CHECK(bits(layer->running_var) == bits(plain->running_var));
      RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 1);
      RANK_CHECK(!affine || bits(layer->weight) == bits(plain->weight));
      layer(at::randn({4, 3, 2, 2}));
      BatchNorm2d back(options);
      through(layer, back);
      RANK_CHECK(bits(layer->running_mean) == bits(back->running_mean));
      RANK_CHECK(back->num_batches_tracked.item<std::int64_t>() == 2);
      // And the module's own ways to begin anew.
      layer->reset_parameters();
      RANK_CHECK(at::equal(layer->running_var, at::ones({3})));
      RANK_CHECK(layer->num_batches_tracked.item<std::int64_t>() == 0);
      RANK_CHECK(!affine || at::equal(layer->weight, at::ones({3})));
    }
  });
}
