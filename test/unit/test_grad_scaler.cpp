#include <limits>
#include <test/support/catch2.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include <ddp/error.h>
#include <ddp/optim/grad_scaler.h>

// The rule of Python's torch.amp.GradScaler.

using Options = ddp::GradScalerOptions;

namespace {

struct Training {
  explicit Training(Options options) : scaler(std::move(options)) {}

  /// A step with the gradient `value`; whether it was made.
  bool step(float value) {
    optimizer.zero_grad();
    scaler.scale((weight * value).sum()).backward();
    const bool was_made = scaler.step(optimizer);
    scaler.update();
    return was_made;
  }
  float position() const { return weight[0].item<float>(); }

  at::Tensor weight = at::zeros({1}).set_requires_grad(true);
  torch::optim::SGD optimizer{{weight}, 1.0};
  ddp::GradScaler scaler;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE(
    "the scale grows after a run of good steps, and shrinks after an overflow, which is left out") {
  Training training(Options().init_scale(8).growth_interval(2).backoff_factor(0.25));
  CHECK(training.step(3));
  CHECK(training.position() == -3);
  CHECK(training.weight.grad()[0].item<float>() == 3);  // unscaled
  CHECK(training.scaler.get_scale() == 8);
  CHECK(training.step(1));
  CHECK(training.scaler.get_scale() == 16);
  CHECK_FALSE(training.step(kInfinity));
  CHECK(training.position() == -4);
  CHECK(training.scaler.get_scale() == 4);
  CHECK(training.step(1));
  CHECK(training.scaler.get_scale() == 4);  // counted anew
  CHECK(training.step(1));
  CHECK(training.scaler.get_scale() == 8);
  training.scaler.set_scale(2);
  CHECK(training.scaler.get_scale() == 2);
}

TEST_CASE("gradients can be looked at before the step") {
  Training training(Options().init_scale(8));
  training.scaler.scale((training.weight * 3).sum()).backward();
  CHECK(training.weight.grad()[0].item<float>() == 24);
  training.scaler.unscale(training.optimizer);
  CHECK(training.weight.grad()[0].item<float>() == 3);
  REQUIRE_THROWS_WITH(training.scaler.unscale(training.optimizer),
                      contains("GradScaler: the gradients are unscaled already: call update()"));
  CHECK(training.scaler.step(training.optimizer));
  CHECK(training.position() == -3);
}

TEST_CASE("a second step before the update is refused: its gradients would not be unscaled") {
  Training training(Options().init_scale(8));
  training.scaler.scale((training.weight * 3).sum()).backward();
  CHECK(training.scaler.step(training.optimizer));
  REQUIRE_THROWS_WITH(training.scaler.step(training.optimizer),
                      contains("GradScaler: step was called a second time: call update()"));
  CHECK(training.position() == -3);
  training.scaler.update();
  CHECK(training.step(1));
}

TEST_CASE("a sparse gradient whose values are not added up yet is unscaled, too") {
  Training training(Options().init_scale(4));
  const auto indices = at::zeros({1, 2}, at::kLong);
  training.scaler.scale(training.weight.sum());
  training.weight.mutable_grad() = at::sparse_coo_tensor(indices, at::tensor({4.0F, 8.0F}), {1});
  CHECK(training.scaler.step(training.optimizer));
  CHECK(training.position() == -3);
}

TEST_CASE("gradients of float16 are refused, as Python's scaler does") {
  auto weight = at::zeros({1}, at::kHalf).set_requires_grad(true);
  torch::optim::SGD optimizer({weight}, 1.0);
  ddp::GradScaler scaler;
  scaler.scale(weight.sum().to(at::kFloat)).backward();
  REQUIRE_THROWS_WITH(scaler.step(optimizer), contains("GradScaler: a gradient is of float16"));
}

TEST_CASE("a scaler that is switched off changes nothing") {
  Training training(Options().enabled(false));
  CHECK(training.step(3));
  CHECK(training.position() == -3);
  CHECK(training.scaler.get_scale() == 1);
}

TEST_CASE("what a scaler cannot be made of, or do") {
  Training training{Options()};
  REQUIRE_THROWS_WITH(training.scaler.step(training.optimizer),
                      contains("GradScaler: unscale or step before scale"));
  REQUIRE_THROWS_WITH(ddp::GradScaler(Options().init_scale(0)),
                      contains("GradScaler: init_scale must be positive; found 0"));
  REQUIRE_THROWS_WITH(ddp::GradScaler(Options().growth_factor(1)),
                      contains("growth_factor must be above 1; found 1"));
  REQUIRE_THROWS_WITH(ddp::GradScaler(Options().backoff_factor(1)),
                      contains("backoff_factor must be between 0 and 1; found 1"));
  REQUIRE_THROWS_WITH(ddp::GradScaler(Options().growth_interval(0)),
                      contains("growth_interval must be positive; found 0"));
  REQUIRE_THROWS_WITH(training.scaler.set_scale(-1),
                      contains("the scale must be positive; found -1"));
}
