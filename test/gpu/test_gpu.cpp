#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <ddp/ddp.h>
#include <ddp/process_group/nccl/cuda_driver.h>

// On a GPU: one is enough. Each case runs in forked ranks, since a process that has used CUDA
// cannot fork.

using ddp::test::Rank;
using ddp::test::RankOptions;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

const bool has_gpu = [] {
  const pid_t child = fork();
  if (child == 0) {
    _exit(ddp::detail::find_cuda_devices().count > 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  if (status != 0) {
    std::puts("skipped: no GPU is visible");
    std::fflush(stdout);
    std::_Exit(77);
  }
  return true;
}();

void start(const std::string& backend) {
  ddp::init_process_group(ddp::InitProcessGroupOptions(backend).timeout(std::chrono::seconds(60)));
}

torch::nn::Sequential make_net(const c10::Device& device) {
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::ReLU(), torch::nn::Linear(64, 4));
  net->to(device);
  return net;
}

at::Tensor make_input(const c10::Device& device, std::int64_t rows = 16) {
  return (at::arange(rows * 32, at::kFloat).reshape({rows, 32}) / 100).sin().to(device);
}

/// Trains five steps; the parameters in one tensor, on the CPU.
template <class Model>
at::Tensor trained(Model& model, const at::Tensor& input) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    model->forward(input).square().mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model->parameters()) {
    flat.push_back(parameter.detach().flatten());
  }
  return at::cat(flat).cpu();
}

void check_all(const std::vector<ddp::test::RankResult>& results) {
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

}  // namespace

TEST_CASE("over NCCL one rank trains as the bare model does, bit for bit") {
  check_all(run_ranks(1, [](const Rank& /*rank*/) {
    start("");
    RANK_CHECK(ddp::get_backend() == "nccl");
    const auto device = ddp::local_device();
    RANK_CHECK(device == c10::Device("cuda:0"));
    auto bare = make_net(device);
    auto net = make_net(device);
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().device_ids({device}));
    const auto expected = trained(bare, make_input(device));
    RANK_CHECK(at::equal(trained(model, make_input(c10::kCPU)), expected));  // moved by the wrapper
    ddp::destroy_process_group();
  }));
}

TEST_CASE("two ranks on one GPU through Gloo train as one process does") {
  RankOptions options;
  check_all(run_ranks(
      2,
      [](const Rank& rank) {
        start("gloo");
        const c10::Device device("cuda:0");
        auto bare = make_net(device);
        const auto whole = make_input(device, 32);
        const auto expected = trained(bare, whole);
        auto net = make_net(device);
        ddp::DistributedDataParallel model(net);
        const auto found = trained(model, whole.narrow(0, 16 * rank.rank(), 16).contiguous());
        RANK_CHECK(at::allclose(found, expected, 1e-4, 1e-5));
        ddp::destroy_process_group();
      },
      options));
}

TEST_CASE("collectives of CUDA and CPU tensors, and of objects, in one group") {
  check_all(run_ranks(1, [](const Rank& /*rank*/) {
    start("nccl");
    const auto device = ddp::local_device();
    for (const auto& where : {device, c10::Device(c10::kCPU)}) {
      auto values = at::full({3}, 2.0F, where);
      ddp::all_reduce(values);
      ddp::all_reduce(values, ddp::ReduceOp::MAX);
      ddp::broadcast(values);
      const auto all = at::empty({3}, at::TensorOptions(where));
      ddp::all_gather_into_tensor(all, values);
      RANK_CHECK(all.sum().item<float>() == 6);
    }
    auto work =
        ddp::all_reduce(at::ones({1 << 20}, device), ddp::AllReduceOptions().async_op(true));
    work.wait();
    std::string text = "a word";
    ddp::broadcast_object(text, 0);
    ddp::barrier();
    ddp::destroy_process_group();
    start("nccl");  // and once more in the same process
    ddp::destroy_process_group();
  }));
}

TEST_CASE("compression on the device") {
  check_all(run_ranks(1, [](const Rank& /*rank*/) {
    start("nccl");
    const auto device = ddp::local_device();
    auto bare = make_net(device);
    const auto expected = trained(bare, make_input(device));
    for (const bool in_bfloat16 : {false, true}) {
      auto net = make_net(device);
      ddp::DistributedDataParallel model(net);
      model->register_comm_hook(in_bfloat16 ? ddp::comm_hooks::bf16_compress()
                                            : ddp::comm_hooks::fp16_compress());
      RANK_CHECK(at::allclose(trained(model, make_input(device)), expected, 0.05, 0.01));
    }
    ddp::destroy_process_group();
  }));
}

TEST_CASE("mixed precision: autocast in the forward, and the gradient scaler") {
  check_all(run_ranks(1, [](const Rank& /*rank*/) {
    start("nccl");
    const auto device = ddp::local_device();
    auto net = make_net(device);
    ddp::DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    ddp::GradScaler scaler;
    float first = 0;
    float last = 0;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      at::autocast::set_autocast_enabled(at::kCUDA, true);
      const auto output = model->forward(make_input(device));
      RANK_CHECK(output.scalar_type() == at::kHalf);
      const auto loss = output.to(at::kFloat).square().mean();
      at::autocast::set_autocast_enabled(at::kCUDA, false);
      at::autocast::clear_cache();
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
      last = loss.item<float>();
      first = step == 0 ? last : first;
    }
    RANK_CHECK(last < first);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("a local rank beyond the GPUs, and a module that was left on the CPU") {
  RankOptions options;
  options.environment = {{"LOCAL_RANK", "99"}};
  const auto beyond = run_ranks(
      1, [](const Rank& /*rank*/) { start("nccl"); }, options);
  CHECK_THAT(beyond[0].error, contains("the local rank is 99, but this machine has"));
  const auto left = run_ranks(1, [](const Rank& /*rank*/) {
    start("nccl");
    auto net = make_net(c10::kCPU);
    ddp::DistributedDataParallel model(net);
  });
  CHECK_THAT(left[0].error, contains("the module is on the CPU"));
}
