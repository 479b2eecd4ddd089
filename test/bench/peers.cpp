#include <algorithm>
#include <limits>
#include <stdexcept>
#include <test/bench/peers.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <ddp/ddp.h>

namespace ddp::bench {
namespace {

Peer bare(const Workload& work) {
  return {[net = work.model](const at::Tensor& input) { return net->forward(input); }};
}

void broadcast_parameters(const Workload& work) {
  for (const auto& parameter : work.model->parameters()) {
    ddp::broadcast(parameter.detach());
  }
}

Peer hand_written(const Workload& work, bool wait_for_each) {
  auto peer = bare(work);
  broadcast_parameters(work);
  peer.after_backward = [parameters = work.model->parameters(), wait_for_each] {
    const torch::NoGradGuard no_grad;
    std::vector<ddp::Work> works;
    for (const auto& parameter : parameters) {
      if (parameter.grad().is_sparse()) {
        // Gloo's all-reduce of this library takes dense tensors, as most programs' loops do.
        parameter.mutable_grad() = parameter.grad().to_dense();
      }
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

/// As torch/nn/parallel/distributed.py drives it: one bucket for each dtype in the first pass, then
/// the caps of 1 and 25 MB in the order in which gradients came.
Peer c10d_reducer(const Workload& work) {
  constexpr std::int64_t kMegabyte = 1024 * 1024;
  broadcast_parameters(work);
  const auto parameters = work.model->parameters();
  auto [indices, limits] = c10d::compute_bucket_assignment_by_size(
      parameters, {static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())},
      work.sparse);
  const std::vector<std::vector<std::size_t>> reversed(indices.rbegin(), indices.rend());
  const auto reducer = std::make_shared<c10d::Reducer>(
      parameters, reversed, ddp::default_group(), work.sparse, 25 * kMegabyte,
      /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
      std::unordered_map<std::size_t, std::string>{}, kMegabyte,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<std::int64_t>{});
  return {[net = work.model, reducer](const at::Tensor& input) {
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    const auto output = net->forward(input);
    reducer->prepare_for_backward({});
    return output;
  }};
}

Peer communication(const Workload& work) {
  constexpr std::int64_t kMessage = 25 * 1024 * 1024 / sizeof(float);
  std::int64_t numel = 0;
  for (const auto& parameter : work.model->parameters()) {
    numel += parameter.numel();
  }
  std::vector<at::Tensor> messages;
  for (; numel > 0; numel -= kMessage) {
    messages.push_back(at::ones({std::min(numel, kMessage)}));
  }
  auto peer = bare(work);
  peer.step = [messages] {
    std::vector<ddp::Work> works;
    for (const auto& message : messages) {
      works.push_back(ddp::all_reduce(message, ddp::AllReduceOptions().async_op(true)));
    }
    for (auto& started : works) {
      started.wait();
    }
  };
  return peer;
}

Peer ours(const Workload& work, bool bucket_view, bool compress) {
  ddp::DistributedDataParallel model(
      work.model, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(bucket_view));
  if (compress) {
    model->register_comm_hook(ddp::comm_hooks::fp16_compress());
  }
  return {[model](const at::Tensor& input) mutable { return model->forward(input); }};
}

}  // namespace

Peer make_peer(const std::string& name, const Workload& work) {
  if (name == "bare") {
    return bare(work);
  }
  if (name == "forward") {
    auto peer = bare(work);
    peer.step = [work, forward = peer.forward] { forward(work.input); };
    return peer;
  }
  ddp::init_process_group(ddp::InitProcessGroupOptions(name == "ours_default" ? "" : "gloo")
                              .timeout(std::chrono::seconds(120)));
  if (name == "hand_written" || name == "hand_written_async") {
    return hand_written(work, name == "hand_written");
  }
  if (name == "c10d_reducer") {
    return c10d_reducer(work);
  }
  if (name == "communication") {
    return communication(work);
  }
  if (name == "ours" || name == "ours_bucket_view" || name == "ours_default" ||
      name == "ours_fp16") {
    return ours(work, name != "ours", name == "ours_fp16");
  }
  throw std::invalid_argument("no peer " + name);
}

}  // namespace ddp::bench
