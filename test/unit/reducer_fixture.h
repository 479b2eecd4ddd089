#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <test/support/fake_process_group.h>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>

#include <ddp/error.h>
#include <ddp/reducer/reducer.h>

// For the reducer's logic over a fake process group: one process, and completions as the test wants
// them.

namespace ddp::test {

inline at::Tensor parameter(std::vector<float> values) {
  return at::tensor(values).set_requires_grad(true);
}

struct Fixture {
  c10::intrusive_ptr<FakeProcessGroup> group;
  std::shared_ptr<FakeChannel> channel = std::make_shared<FakeChannel>();
  std::vector<NamedParameter> parameters;
  ReducerOptions options;
  std::shared_ptr<Reducer> reducer;

  explicit Fixture(int size = 2) : group(c10::make_intrusive<FakeProcessGroup>(size)) {}

  at::Tensor add(const std::string& name, std::vector<float> values) {
    parameters.push_back({name, parameter(std::move(values))});
    return parameters.back().tensor;
  }
  void make() { reducer = Reducer::create(parameters, group, channel, "model", options); }
  void forward() {
    reducer->prepare_for_forward();
    reducer->set_synchronize(true);
  }
  void zero_grad(bool set_to_none) {
    for (auto& entry : parameters) {
      auto& gradient = entry.tensor.mutable_grad();
      if (set_to_none) {
        gradient.reset();
      } else if (gradient.defined()) {
        gradient.detach_();
        gradient.zero_();
      }
    }
  }
};

inline bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  return at::equal(left, right);
}

/// Passes its input through; its backward throws, or returns no gradient.
struct Throwing : torch::autograd::Function<Throwing> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                            const at::Tensor& input) {
    return input.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      const torch::autograd::variable_list& /*gradients*/) {
    throw std::domain_error("the layer's own error");
  }
};

struct NoGradient : torch::autograd::Function<NoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                            const at::Tensor& input) {
    return input.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      const torch::autograd::variable_list& /*gradients*/) {
    return {at::Tensor()};
  }
};

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
