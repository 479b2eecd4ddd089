#include "net.h"

#include <utility>

NetImpl::NetImpl(const NetOptions& options)
    : conv1_(register_module("conv1",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)))),
      conv2_(register_module("conv2",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)))),
      hidden_(register_module("hidden", torch::nn::Linear(32 * 7 * 7, 64))),
      scores_(register_module("scores", torch::nn::Linear(64, 10))) {
  if (options.batch_norm) {
    norm1_ = register_module("norm1", torch::nn::BatchNorm2d(16));
    norm2_ = register_module("norm2", torch::nn::BatchNorm2d(32));
  }
}

torch::Tensor NetImpl::forward(torch::Tensor images) {
  auto x = conv1_->forward(images);
  if (norm1_) {
    x = norm1_->forward(x);
  }
  x = torch::max_pool2d(torch::relu(x), /*kernel_size=*/2);
  x = conv2_->forward(x);
  if (norm2_) {
    x = norm2_->forward(x);
  }
  x = torch::max_pool2d(torch::relu(x), /*kernel_size=*/2);
  return scores_->forward(torch::relu(hidden_->forward(x.flatten(1))));
}
