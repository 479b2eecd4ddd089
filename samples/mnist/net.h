#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

struct NetOptions {
  bool batch_norm = true;
};

/// Two convolutions and two linear layers, from 28 x 28 grey pixels to a score for each of 10
/// digits. It knows nothing of data-parallel training.
class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(const NetOptions& options = {});

  /// `images`: float, N x 1 x 28 x 28. Returns N x 10.
  torch::Tensor forward(torch::Tensor images);

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::Conv2d conv2_;
  torch::nn::BatchNorm2d norm1_{nullptr};
  torch::nn::BatchNorm2d norm2_{nullptr};
  torch::nn::Linear hidden_;
  torch::nn::Linear scores_;
};
TORCH_MODULE(Net);
