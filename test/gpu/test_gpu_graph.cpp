#include <test/support/catch2.h>
#include <test/support/ranks.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/nn.h>

#include <ddp/ddp.h>

// CUDA graphs: a training step is captured after three outside, and refused before.

using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

struct Step {
  Step() : net(8, 8) {
    net->to(ddp::local_device());
    model = ddp::DistributedDataParallel(net);
  }
  void operator()() {
    for (auto& parameter : model->parameters()) {
      parameter.mutable_grad().reset();
    }
    model->forward(input).sum().backward();
  }

  torch::nn::Linear net;
  at::Tensor input = at::ones({4, 8}, ddp::local_device());
  ddp::DistributedDataParallel<torch::nn::Linear> model{nullptr};
};

/// In a stream of its own, as captures must be; wrapped, warmed up and captured there.
void in_side_stream(const std::function<void()>& body) {
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 1);
  ddp::init_process_group(ddp::InitProcessGroupOptions("nccl").timeout(std::chrono::seconds(60)));
  ddp::local_device();
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    body();
  }
  ddp::destroy_process_group();
}

}  // namespace

TEST_CASE("a captured step averages anew with each replay") {
  const auto results = run_ranks(1, [](const Rank& /*rank*/) {
    in_side_stream([] {
      Step step;
      for (int i = 0; i < 3; ++i) {
        step();
      }
      at::cuda::CUDAGraph graph;
      graph.capture_begin();
      step();
      graph.capture_end();
      const auto gradient = step.net->weight.grad();
      step.input.fill_(2);
      graph.replay();
      RANK_CHECK(gradient.sum().item<float>() == 8 * 8 * 4 * 2);
    });
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
}

TEST_CASE("a capture before the layout is agreed on is refused") {
  const auto results = run_ranks(1, [](const Rank& rank) {
    in_side_stream([&] {
      Step step;
      step();
      at::cuda::CUDAGraph graph;
      graph.capture_begin();
      try {
        step();
      } catch (const ddp::UsageError& error) {
        rank.report("refusal", std::string(error.what()));
      }
      graph.capture_end();
    });
  });
  INFO(summary(results));
  CHECK_THAT(results[0]["refusal"], contains("this step is being captured into a CUDA graph"));
}
