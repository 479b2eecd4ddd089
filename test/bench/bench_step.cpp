// One rank of a C++ peer of the benchmark: trains whenever bench.py says so.
//
//   bench_step PEER    with RANK, WORLD_SIZE, ... as the launcher sets them
//
// Reads lines "STEPS" from its standard input, takes that many training steps, and answers with
// their mean time in seconds. Ends at end of file.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <ddp/ddp.h>

namespace {

constexpr int kLayers = 12;
constexpr int kWidth = 1024;
constexpr int kBatch = 32;
constexpr double kLearningRate = 0.01;

torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < kLayers; ++layer) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

/// What a peer does in place of `model(input)`, and between backward and the optimizer's step.
struct Peer {
  std::vector<at::Tensor> parameters;
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::function<void()> after_backward = [] {};
};

Peer bare() {
  auto model = make_model();
  return {model->parameters(),
          [model](const at::Tensor& input) mutable { return model->forward(input); }};
}

/// What a C++ program does without ddp: all-reduces each gradient after backward.
Peer hand_written(bool wait_for_each) {
  auto peer = bare();
  for (const auto& parameter : peer.parameters) {
    ddp::broadcast(parameter.detach());
  }
  peer.after_backward = [parameters = peer.parameters, wait_for_each] {
    const torch::NoGradGuard no_grad;
    std::vector<ddp::Work> works;
    for (const auto& parameter : parameters) {
      works.push_back(
          ddp::all_reduce(parameter.grad(), ddp::AllReduceOptions().async_op(!wait_for_each)));
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!wait_for_each) {
        works[i].wait();
      }
      parameters[i].grad().div_(ddp::get_world_size());
    }
  };
  return peer;
}

Peer ours(bool bucket_view) {
  ddp::DistributedDataParallel model(
      make_model(), ddp::DistributedDataParallelOptions().gradient_as_bucket_view(bucket_view));
  return {model->parameters(),
          [model](const at::Tensor& input) mutable { return model->forward(input); }};
}

Peer make_peer(const std::string& name) {
  if (name == "bare") {
    return bare();
  }
  ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(std::chrono::seconds(120)));
  if (name == "hand_written" || name == "hand_written_async") {
    return hand_written(name == "hand_written");
  }
  if (name == "ours" || name == "ours_bucket_view") {
    return ours(name == "ours_bucket_view");
  }
  throw std::invalid_argument("no peer " + name);
}

int serve(const std::string& name) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  auto peer = make_peer(name);
  torch::optim::SGD optimizer(peer.parameters, torch::optim::SGDOptions(kLearningRate));
  const auto input = torch::randn({kBatch, kWidth});
  const auto target = torch::randn({kBatch, kWidth});
  const auto step = [&] {
    optimizer.zero_grad();
    torch::mse_loss(peer.forward(input), target).backward();
    peer.after_backward();
    optimizer.step();
  };
  std::printf("ready\n");
  std::fflush(stdout);
  for (int steps = 0; std::cin >> steps;) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      step();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    std::printf("%.9f\n", elapsed.count() / std::max(steps, 1));
    std::fflush(stdout);
  }
  if (ddp::is_initialized()) {
    ddp::destroy_process_group();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bench_step PEER\n");
    return 2;
  }
  try {
    return serve(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step %s: %s\n", argv[1], error.what());
    return 1;
  }
}
