#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

namespace ddp::parity {

/// A model of the matrix; models.py has the same ones, from the same operations.
class Model : public torch::nn::Module {
 public:
  /// `use_spare`: this rank runs the layer `spare` now, which the model must have been made with.
  virtual torch::Tensor forward(torch::Tensor x, bool use_spare) = 0;
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const = 0;
};

/// Throws std::invalid_argument where there is no model of this name.
std::shared_ptr<Model> make_model(const std::string& name, bool with_spare);

}  // namespace ddp::parity
