// A program as torch.distributed.launch starts them: takes --local_rank or reads the environment,
// meets the others by env://, and trains one step. launched_test.sh runs it under the launcher.

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/nn/modules/linear.h>

#include <ddp/ddp.h>

namespace {

/// Trains until there is a file $DIR/end, which rank 0 looks for; after a while it says so in a
/// file $DIR/trained.WORLD_SIZE. For jobs whose ranks come and go.
int train_until_end(int rank, int world_size) {
  constexpr int kAWhile = 20;
  const std::string folder = std::getenv("DIR");
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  ddp::DistributedDataParallel model(net);
  const float expected = (world_size + 1) / 2.0F;
  bool right = true;
  for (int step = 1;; ++step) {
    net->zero_grad();
    model->forward(at::full({1, 1}, rank + 1.0F)).sum().backward();
    right = right && net->weight.grad().item<float>() == expected;
    if (rank == 0 && step == kAWhile)
      std::ofstream(folder + "/trained." + std::to_string(world_size)) << step;
    auto end = at::full({1}, rank == 0 && std::ifstream(folder + "/end").good() ? 1.0F : 0.0F);
    ddp::all_reduce(end);
    if (end.item<float>() > 0) break;
  }
  std::cout << (right ? "right: rank " : "WRONG: rank ") + std::to_string(rank) + " of " +
                   std::to_string(world_size) + "\n";
  ddp::destroy_process_group();
  return right ? 0 : 1;
}

int run(const std::string& mode, int local_rank) {
  if (mode == "throws" && local_rank == 1) throw ddp::UsageError("rank 1 wants no more");
  const auto timeout = std::chrono::seconds(
      std::getenv("LAUNCHED_TIMEOUT") ? std::atoi(std::getenv("LAUNCHED_TIMEOUT")) : 60);
  ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(timeout));
  const int rank = ddp::get_rank();
  const int world_size = ddp::get_world_size();
  if (mode == "store") {
    // Rank 0 leaves at once; the store must outlive it until the others have left too.
    auto value = at::full({1}, 1.0F);
    ddp::all_reduce(value);
    const auto store = ddp::default_group()->getStore();
    if (rank == 0) {
      store->set("parting", std::vector<std::uint8_t>{'w', 'o', 'r', 'd'});
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      const auto word = store->get("parting");
      std::cout << "rank " << rank << " read " << std::string(word.begin(), word.end())
                << std::endl;
    }
    ddp::destroy_process_group();
    return 0;
  }
  if (mode == "until_end") return train_until_end(rank, world_size);
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  ddp::DistributedDataParallel model(net);
  model->forward(at::full({1, 1}, rank + 1.0F)).sum().backward();
  const float expected = (world_size + 1) / 2.0F;
  const bool right =
      net->weight.grad().item<float>() == expected && local_rank == ddp::local_rank();
  std::cout << (right ? "right: rank " : "WRONG: rank ") + std::to_string(rank) + " of " +
                   std::to_string(world_size) + ", local rank " + std::to_string(local_rank) + "\n";
  ddp::destroy_process_group();
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = "step";
  int local_rank = std::getenv("LOCAL_RANK") != nullptr ? std::atoi(std::getenv("LOCAL_RANK")) : -1;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--local_rank=", 13) == 0) {
      local_rank = std::atoi(argv[i] + 13);
    } else {
      mode = argv[i];
    }
  }
  if (mode == "environment" && argc != 2) {
    std::cout << "WRONG: an argument too many\n";
    return 1;
  }
  return ddp::record_errors([&] { return run(mode, local_rank); });
}
