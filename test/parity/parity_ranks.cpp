// One rank of the C++ side: runs the plan's cells and writes the parameters after every step.
//
//   parity_ranks INPUTS FOLDER     with RANK, WORLD_SIZE, ... as the launcher sets them
//
// python_ranks.py is its twin.

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <test/parity/cells.h>
#include <test/parity/models.h>
#include <test/parity/tensor_file.h>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <ddp/ddp.h>
#include <ddp/reducer/reducer.h>

namespace ddp::parity {
namespace {

constexpr std::chrono::seconds kTimeout(60);

using Tensors = std::map<std::string, at::Tensor>;

DistributedDataParallelOptions options_of(const Plan& plan, const Cell& cell) {
  DistributedDataParallelOptions options;
  options.find_unused_parameters(cell.find_unused_parameters);
  options.static_graph(cell.static_graph);
  options.python_compatible(plan.python_compatible || cell.python_compatible);
  if (cell.gradient_as_bucket_view) {
    options.gradient_as_bucket_view(*cell.gradient_as_bucket_view);
  }
  options.bucket_cap_mb(cell.bucket_cap_mb);
  return options;
}

CommHook make_hook(const Cell& cell) {
  const auto power_sgd = [&] {
    return comm_hooks::power_sgd(comm_hooks::PowerSGDOptions()
                                     .matrix_approximation_rank(cell.low_rank)
                                     .start_power_sgd_iter(2)
                                     .warm_start(cell.warm_start));
  };
  if (cell.hook == "allreduce") {
    return comm_hooks::allreduce();
  }
  if (cell.hook == "fp16_compress") {
    return comm_hooks::fp16_compress();
  }
  if (cell.hook == "bf16_compress") {
    return comm_hooks::bf16_compress();
  }
  if (cell.hook == "fp16_compress_wrapper") {
    return comm_hooks::fp16_compress_wrapper(comm_hooks::allreduce());
  }
  if (cell.hook == "bf16_compress_wrapper") {
    return comm_hooks::bf16_compress_wrapper(comm_hooks::allreduce());
  }
  if (cell.hook == "power_sgd") {
    return power_sgd();
  }
  if (cell.hook == "fp16_power_sgd") {
    return comm_hooks::fp16_compress_wrapper(power_sgd());
  }
  if (cell.hook == "quantization_per_tensor") {
    return comm_hooks::quantization_per_tensor();
  }
  if (cell.hook == "quantization_per_channel") {
    return comm_hooks::quantization_per_channel();
  }
  if (cell.hook == "post_local_sgd") {
    comm_hooks::PostLocalSGDOptions options(kLocalStart);
    options.post_local_gradient_allreduce(cell.subgroups);
    if (cell.subgroups) {
      // Pairs; the last rank of an odd number is alone.
      const int first = get_rank() / 2 * 2;
      options.subgroup(first + 1 < get_world_size() ? new_group({first, first + 1})
                                                    : new_group({first}));
    }
    return comm_hooks::post_local_sgd(options);
  }
  throw std::invalid_argument("there is no hook " + cell.hook);
}

void load(Model& model, const Tensors& weights) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    // A tied weight is listed under several names, and the file has the first.
    if (const auto weight = weights.find(parameter.key()); weight != weights.end()) {
      parameter.value().copy_(weight->second);
    }
  }
}

/// The buckets' sizes in bytes, in the order in which they are reduced.
at::Tensor bucket_sizes(const DistributedDataParallelBase& model) {
  const auto parameters = model.parameters();
  std::vector<std::int64_t> sizes;
  for (const auto& bucket : model.reducer()->bucket_assignment()) {
    sizes.push_back(0);
    for (const auto index : bucket) {
      sizes.back() += static_cast<std::int64_t>(parameters[index].nbytes());
    }
  }
  return at::tensor(sizes, at::kLong);
}

void add_state(TensorWriter& results, const DistributedDataParallelBase& model,
               const std::string& label) {
  for (const auto& entries : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& entry : entries) {
      results.add(label + "/" + entry.key(), entry.value());
    }
  }
}

void run(const Plan& plan, const Cell& cell, const std::string& inputs, const std::string& folder) {
  const int rank = get_rank();
  const auto batches = read_tensors(inputs + "/batches." + cell.model + "." + std::to_string(rank));
  TensorWriter results(folder + "/" + cell.name + "." + std::to_string(rank));

  torch::manual_seed(rank);
  auto module = make_model(cell.model, cell.spare != Spare::kAbsent);
  if (rank == 0) {
    // The other ranks start from weights of their own, and get rank 0's by being wrapped.
    load(*module, read_tensors(inputs + "/weights." + cell.model));
  }
  DistributedDataParallel model(module, options_of(plan, cell));
  if (!cell.hook.empty()) {
    model->register_comm_hook(make_hook(cell));
  }
  std::optional<PeriodicModelAverager> averager;
  if (cell.averaging > 0) {
    averager.emplace(PeriodicModelAveragerOptions(cell.averaging).warmup_steps(kLocalStart));
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(plan.learning_rate)
                                                       .momentum(cell.momentum)
                                                       .weight_decay(cell.weight_decay));

  const auto train = [&] {
    const int steps = steps_of(cell.join, plan.steps, rank, get_world_size());
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad(cell.set_to_none);
      for (int micro = 0; micro < cell.micro_batches; ++micro) {
        const auto batch = std::to_string(step * cell.micro_batches + micro);
        std::unique_ptr<NoSyncGuard> guard;
        if (micro + 1 < cell.micro_batches) {
          guard.reset(new NoSyncGuard(model->no_sync()));
        }
        const auto output =
            model->forward(batches.at(batch + "/input"), spare_is_used(cell.spare, rank, step));
        const auto loss = module->loss(output, batches.at(batch + "/target"));
        (loss / cell.micro_batches).backward();
      }
      optimizer.step();
      if (averager) {
        averager->average_parameters(model->parameters());
      }
      if (cell.evaluate) {
        const torch::NoGradGuard no_grad;
        model->eval();
        model->forward(batches.at(std::to_string(step) + "/input"), false);
        model->train();
      }
      add_state(results, *model, std::to_string(step));
    }
  };
  if (cell.join == Join::kNone) {
    train();
  } else {
    model->join(train, JoinOptions().divide_by_initial_world_size(cell.join == Join::kInitial));
  }
  add_state(results, *model, "end");
  results.add("buckets", bucket_sizes(*model));
  results.close();
}

int run_all(const std::string& inputs, const std::string& folder) {
  at::set_num_threads(1);
  const auto plan = read_plan(folder + "/plan");
  init_process_group(InitProcessGroupOptions("gloo").timeout(kTimeout));
  for (const auto& cell : plan.cells) {
    // The log's last word, should the process die.
    std::printf("%s\n", cell.name.c_str());
    std::fflush(stdout);
    run(plan, cell, inputs, folder);
  }
  barrier();  // as Python's ranks
  destroy_process_group();
  return 0;
}

}  // namespace
}  // namespace ddp::parity

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: parity_ranks INPUTS FOLDER\n");
    return 2;
  }
  try {
    return ddp::parity::run_all(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
