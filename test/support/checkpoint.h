#pragma once

#include <functional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ddp::test {

/// A re-entrant checkpoint: runs `body` again in its backward, with a nested backward().
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            std::function<at::Tensor(const at::Tensor&)>* body) {
    context->saved_data["body"] = reinterpret_cast<std::int64_t>(body);
    context->save_for_backward({input});
    const at::NoGradGuard no_grad;
    return (*body)(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* body = reinterpret_cast<std::function<at::Tensor(const at::Tensor&)>*>(
        context->saved_data["body"].toInt());
    const at::AutoGradMode with_grad(true);
    auto input = context->get_saved_variables().front().detach().set_requires_grad(true);
    const auto output = (*body)(input);
    output.backward(gradients.front());
    return {input.grad(), at::Tensor()};
  }
};

}  // namespace ddp::test
