#pragma once

#include <functional>
#include <stdexcept>
#include <test/support/ranks.h>
#include <test/support/tensors.h>

#include <ddp/ddp.h>

namespace ddp::test {

/// Joins the default group, over the tests' backend.
inline void start(std::chrono::milliseconds timeout = std::chrono::seconds(15)) {
  ddp::init_process_group(ddp::InitProcessGroupOptions(backend()).timeout(timeout));
}

/// The rows (1,0), (0,1), (1,1), (2,-1).
inline at::Tensor four_rows() {
  return at::tensor({1.0F, 0.0F, 0.0F, 1.0F, 1.0F, 1.0F, 2.0F, -1.0F}).view({4, 2});
}

inline at::Tensor own_rows(const at::Tensor& rows, const Rank& rank) {
  return rows.chunk(rank.world_size())[rank.rank()].clone();
}

inline torch::nn::Linear scalar_layer() {
  torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
  set_values(layer->weight, at::tensor({1.0F}));
  return layer;
}

/// Two layers of one weight each; the forward uses what it is told.
struct TwoImpl : torch::nn::Module {
  torch::nn::Linear a = register_module("a", scalar_layer());
  torch::nn::Linear b = register_module("b", scalar_layer());
  at::Tensor forward(const at::Tensor& x, bool use_a = true, bool use_b = true) {
    auto sum = at::zeros_like(x);
    if (use_a) {
      sum = sum + a(x);
    }
    if (use_b) {
      sum = sum + b(x);
    }
    return sum;
  }
};
TORCH_MODULE(Two);

inline at::Tensor scalar_input(const Rank& rank) { return at::full({1, 1}, rank.rank() + 1.0F); }

/// Identity whose backward throws on one rank.
struct ThrowOnRank : torch::autograd::Function<ThrowOnRank> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            bool throws) {
    context->saved_data["throws"] = throws;
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (context->saved_data["throws"].toBool()) {
      throw std::domain_error("a fault of this rank's own");
    }
    return {gradients.front(), at::Tensor()};
  }
};

/// Identity whose backward runs a function.
struct InBackward : torch::autograd::Function<InBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            std::function<void()>* act) {
    context->saved_data["act"] = reinterpret_cast<std::int64_t>(act);
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["act"].toInt()))();
    return {gradients.front(), at::Tensor()};
  }
};

}  // namespace ddp::test
