#include <iostream>

#include <torch/torch.h>

#include <ddp/ddp.h>

int main() {
  ddp::init_process_group(ddp::InitProcessGroupOptions("gloo").timeout(std::chrono::seconds(60)));
  torch::nn::Linear net(2, 1);
  ddp::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  optimizer.zero_grad();
  model->forward(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  std::cout << "rank " << ddp::get_rank() << " of " << ddp::get_world_size()
            << " trained one step\n";
  ddp::destroy_process_group();
}
