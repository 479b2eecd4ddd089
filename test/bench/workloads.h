#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn.h>

namespace ddp::bench {

/// A module of one input and one output, so that every model is called alike.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& input) = 0;
};

/// A model with one batch of made-up data: what every peer of the benchmark trains.
/// test/bench/workloads.py has the same ones for Python.
struct Workload {
  std::shared_ptr<Net> model;
  at::Tensor input;
  /// Of the mean squared error, which is every workload's loss.
  at::Tensor target;
  /// One for each of the model's parameters, in the order of `parameters()`.
  std::vector<bool> sparse;
};

/// mlp (12 layers of 1024 x 1024, batch 32), resnet50 (its parameter shapes, images of 32 x 32),
/// transformer (4 encoder layers, 12.6 million parameters), deep (400 layers of 32 x 32, batch 8),
/// digits (the MNIST sample's model, batch 64), embedding (100,000 x 64, sparse gradient). Throws
/// std::invalid_argument for another name.
Workload make_workload(const std::string& name);

}  // namespace ddp::bench
