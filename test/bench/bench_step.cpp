// One rank of a C++ peer of the benchmark: trains whenever bench.py says so.
//
//   bench_step PEER WORKLOAD [STEPS]    with RANK, WORLD_SIZE, ... as the launcher sets them
//
// Reads lines "STEPS" from its standard input, takes that many training steps, and answers with
// their mean time in seconds. Ends at end of file. With STEPS as an argument: takes these, answers,
// and ends.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <test/bench/peers.h>

#include <ATen/Parallel.h>
#include <torch/optim.h>

#include <ddp/ddp.h>

namespace {

constexpr double kLearningRate = 1e-3;

void serve(const std::string& name, const std::string& workload, int steps_at_once) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  const auto work = ddp::bench::make_workload(workload);
  const auto peer = ddp::bench::make_peer(name, work);
  const auto parameters = work.model->parameters();
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(kLearningRate));
  const auto turn = [&](int steps) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      if (peer.step) {
        peer.step();
        continue;
      }
      // Not optimizer.zero_grad(), which refuses the views that c10d::Reducer makes.
      for (const auto& parameter : parameters) {
        parameter.mutable_grad().reset();
      }
      torch::mse_loss(peer.forward(work.input), work.target).backward();
      peer.after_backward();
      optimizer.step();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    std::printf("%.9f\n", elapsed.count() / std::max(steps, 1));
    std::fflush(stdout);
  };
  if (steps_at_once > 0) {
    turn(steps_at_once);
    return;
  }
  std::printf("ready\n");
  std::fflush(stdout);
  for (int steps = 0; std::cin >> steps;) {
    turn(steps);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: bench_step PEER WORKLOAD [STEPS]\n");
    return 2;
  }
  try {
    serve(argv[1], argv[2], argc == 4 ? std::atoi(argv[3]) : 0);
    if (ddp::is_initialized()) {
      ddp::destroy_process_group();
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step %s %s: %s\n", argv[1], argv[2], error.what());
    return 1;
  }
}
