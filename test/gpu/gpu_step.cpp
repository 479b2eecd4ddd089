// One rank that trains on a GPU and says how: scripts/gpu_check.sh runs it beside gpu_step.py.
//
//   gpu_step PEER WORKLOAD STEPS TENSORS    with RANK, WORLD_SIZE, ... as the launcher sets them
//
// PEER: bare (the module alone) or ddp (wrapped, over NCCL). TENSORS: a file of test/parity's kind
// with the input, the target and the parameters ("p0", "p1", ...). Prints one line of JSON: the
// losses, milliseconds of a step and of its communication alone, by the device's events, and the
// peak of the memory that was allocated.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <test/bench/workloads.h>
#include <test/parity/tensor_file.h>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <ddp/ddp.h>

namespace {

/// Milliseconds between two places in the current stream.
class Stopwatch {
 public:
  explicit Stopwatch(const c10::Device& device) : device_(device) { begin_.record(stream()); }

  double stop() {
    end_.record(stream());
    end_.synchronize();
    return begin_.elapsedTime(end_);
  }

 private:
  c10::Stream stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }

  const c10::Device device_;
  c10::Event begin_{device_.type(), c10::EventFlag::BACKEND_DEFAULT};
  c10::Event end_{device_.type(), c10::EventFlag::BACKEND_DEFAULT};
};

struct Report {
  std::vector<at::Tensor> losses;
  double step_ms = 0;
  double communication_ms = 0;
};

template <class Model>
Report train(Model& model, const ddp::bench::Workload& work, int steps, const c10::Device& device) {
  constexpr int kWarmUp = 5;
  Report report;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-3));
  const auto step = [&] {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(work.input), work.target);
    loss.backward();
    optimizer.step();
    report.losses.push_back(loss.detach());
  };
  for (int i = 0; i < kWarmUp; ++i) {
    step();
  }
  Stopwatch watch(device);
  for (int i = 0; i < steps; ++i) {
    step();
  }
  report.step_ms = watch.stop() / steps;
  return report;
}

double communication(const std::vector<at::Tensor>& parameters, const c10::Device& device) {
  constexpr int kTurns = 10;
  std::int64_t numel = 0;
  for (const auto& parameter : parameters) {
    numel += parameter.numel();
  }
  const auto message = at::zeros({numel}, device);
  ddp::all_reduce(message, ddp::ReduceOp::AVG);
  Stopwatch watch(device);
  for (int i = 0; i < kTurns; ++i) {
    ddp::all_reduce(message, ddp::ReduceOp::AVG);
  }
  return watch.stop() / kTurns;
}

void print(const Report& report, const c10::Device& device) {
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  std::printf("{\"losses\": [");
  for (std::size_t i = 0; i < report.losses.size(); ++i) {
    std::printf("%s%.9g", i == 0 ? "" : ", ", report.losses[i].item<double>());
  }
  std::printf("], \"step_ms\": %.4f, \"communication_ms\": %.4f, \"peak_bytes\": %lld}\n",
              report.step_ms, report.communication_ms,
              static_cast<long long>(stats.allocated_bytes[0].peak));
}

void run(const std::string& peer, const std::string& name, int steps, const std::string& file) {
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
  ddp::init_process_group("nccl");
  const auto device = ddp::local_device();
  auto work = ddp::bench::make_workload(name);
  const auto tensors = ddp::parity::read_tensors(file);
  {
    const torch::NoGradGuard no_grad;
    const auto parameters = work.model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].copy_(tensors.at("p" + std::to_string(i)));
    }
  }
  work.model->to(device);
  work.input = tensors.at("input").to(device);
  work.target = tensors.at("target").to(device);
  Report report;
  if (peer == "bare") {
    report = train(work.model, work, steps, device);
  } else {
    ddp::DistributedDataParallel model(work.model);
    report = train(model, work, steps, device);
    report.communication_ms = communication(work.model->parameters(), device);
  }
  print(report, device);
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: gpu_step bare|ddp WORKLOAD STEPS TENSORS\n");
    return 2;
  }
  try {
    run(argv[1], argv[2], std::atoi(argv[3]), argv[4]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_step %s %s: %s\n", argv[1], argv[2], error.what());
    return 1;
  }
}
