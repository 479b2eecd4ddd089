// How the reducer's own cost grows with the number of parameters.
//
//   bench_growth [--rounds N]
//
// One process, a group of one, parameters of four elements each; the model's own backward is a
// single node, so that what is measured is what each parameter costs. In each round, for each count
// in turn: passes of the bare parameters and of the wrapped ones. Prints a line
// "COUNT BARE WRAPPED" with the medians over the rounds, in seconds a pass.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn.h>

#include <ddp/ddp.h>

namespace {

constexpr int kCounts[] = {100, 1000, 10000, 100000};

struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(int count) {
    for (int i = 0; i < count; ++i) {
      all.push_back(register_parameter(std::to_string(i), torch::ones({4})));
    }
  }
  at::Tensor forward(const at::Tensor& input) { return torch::cat(all).mul(input).sum(); }
  std::vector<at::Tensor> all;
};
TORCH_MODULE(Many);

double seconds(int repeats, const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    act();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / repeats;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Measured {
  int count;
  Many bare;
  ddp::DistributedDataParallel<Many> wrapped;
  std::vector<double> bare_times;
  std::vector<double> wrapped_times;
};

void run(int rounds) {
  at::set_num_threads(1);
  ddp::init_process_group(ddp::InitProcessGroupOptions("gloo")
                              .store(c10::make_intrusive<c10d::HashStore>())
                              .rank(0)
                              .world_size(1));
  std::vector<Measured> all;
  for (const int count : kCounts) {
    const Many bare(count);
    const Many wrapped(count);
    all.push_back({count, bare, ddp::DistributedDataParallel<Many>(wrapped), {}, {}});
  }
  const auto factor = torch::ones({1});
  const auto pass = [&](auto& model, const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
    model->forward(factor).backward();
  };
  for (auto& one : all) {
    pass(one.bare, one.bare->all);
    pass(one.wrapped, one.wrapped->module()->all);  // its buckets are final from the second pass on
    pass(one.wrapped, one.wrapped->module()->all);
  }
  for (int round = 0; round < rounds; ++round) {
    for (auto& one : all) {
      const int repeats = std::max(2, 20000 / one.count);
      one.bare_times.push_back(seconds(repeats, [&] { pass(one.bare, one.bare->all); }));
      one.wrapped_times.push_back(
          seconds(repeats, [&] { pass(one.wrapped, one.wrapped->module()->all); }));
    }
  }
  for (const auto& one : all) {
    std::printf("%d %.9f %.9f\n", one.count, median(one.bare_times), median(one.wrapped_times));
  }
  all.clear();
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 7;
  if (argc == 3 && std::strcmp(argv[1], "--rounds") == 0) {
    rounds = std::max(1, std::atoi(argv[2]));
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: bench_growth [--rounds N]\n");
    return 2;
  }
  try {
    run(rounds);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_growth: %s\n", error.what());
    return 1;
  }
}
