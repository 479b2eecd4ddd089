#include <cmath>
#include <sstream>
#include <test/process/models.h>
#include <test/support/catch2.h>

// DistributedDataParallel on forked ranks over Gloo: what may be wrapped and what is refused.

using ddp::test::four_rows;
using ddp::test::own_rows;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::set_values;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;
using ddp::test::TwoImpl;

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
               contains("the ranks' models or options differ. rank 0 has 2 parameters") &&
                   contains("rank 1 has 1 parameter and"));
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
      refused = std::string(error.what())
                    .find(
                        "ignored_parameters has \"c.weight\", but the module has no parameter "
                        "or buffer of that name") != std::string::npos;
    }
    RANK_CHECK(refused);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE("an empty holder is refused, and a rank that wraps no model is named") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start(std::chrono::milliseconds(3000));
    ddp::barrier();  // else rank 1 might end while rank 0 still connects
    try {
      ddp::DistributedDataParallel<Two> model{Two(nullptr)};
    } catch (const ddp::UsageError& error) {
      rank.report("empty", std::string(error.what()));
    }
    if (rank.rank() == 0) {
      Two net;
      ddp::DistributedDataParallel model(net);
    }
  });
  INFO(summary(results));
  CHECK_THAT(results[0]["empty"], contains("DistributedDataParallel: the module is empty"));
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error,
             contains("rank 1 has not wrapped its model in DistributedDataParallel within 3.0 s"));
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
      refused = std::string(error.what())
                    .find("DistributedDataParallel: bucket_cap_mb is 0 MiB; it must be positive") !=
                std::string::npos;
    }
    RANK_CHECK(refused);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
}

TEST_CASE("logging_data tells what the wrapper is made of, and prints itself") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().find_unused_parameters(false));
    const auto before = model->logging_data();
    RANK_CHECK(before.rank == rank.rank() && before.world_size == 2);
    RANK_CHECK(before.backend_name == ddp::test::backend() && before.dtypes == "Float");
    RANK_CHECK(before.num_parameter_tensors == 4 && before.total_parameter_size_bytes == 120);
    RANK_CHECK(before.bucket_sizes == std::vector<std::int64_t>{120});
    RANK_CHECK(before.iteration == 0 && !before.has_rebuilt_buckets);
    for (int step = 0; step < 3; ++step) {
      model(at::ones({2, 4})).sum().backward();
    }
    const auto after = model->logging_data();
    RANK_CHECK(after.iteration == 3 && after.num_buckets_reduced == 1);
    RANK_CHECK(after.has_rebuilt_buckets);
    RANK_CHECK(after.rebuilt_bucket_sizes == std::vector<std::int64_t>{120});
    RANK_CHECK(after.rebuilt_per_bucket_param_indices.front().size() == 4);
    for (const auto& times : {after.last, after.average}) {
      RANK_CHECK(times.forward_compute.count() > 0 && times.backward_compute.count() > 0);
      RANK_CHECK(times.backward_comm >= times.backward_compute_comm_overlap);
      RANK_CHECK(times.backward_compute >= times.backward_compute_comm_overlap);
    }
    RANK_CHECK(after.error.empty());
    std::ostringstream text;
    text << after;
    rank.report("text", text.str());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK_THAT(results[1]["text"], contains("rank: 1\n") && contains("rebuilt_bucket_sizes: 120\n") &&
                                     contains("iteration: 3\n") &&
                                     contains("avg_backward_comm_time: "));
}

TEST_CASE("device_ids is refused for a module on the CPU, on every rank") {
  const auto results = run_ranks(2, [](const Rank& /*rank*/) {
    start();
    ddp::DistributedDataParallel model(
        torch::nn::Linear(2, 2),
        ddp::DistributedDataParallelOptions().device_ids({torch::Device(torch::kCUDA, 0)}));
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "UsageError");
    CHECK_THAT(result.error, contains("device_ids") && contains("module->to(ddp::local_device())"));
  }
}
