#include <memory>
#include <test/support/catch2.h>
#include <test/support/fake_process_group.h>
#include <thread>

#include <torch/csrc/autograd/custom_function.h>

#include <ddp/error.h>
#include <ddp/reducer/reducer.h>
#include <ddp/reducer/watched_wait.h>

// The reducer's logic over a fake process group: one process, and completions as the test wants
// them.

using ddp::NamedParameter;
using ddp::Reducer;
using ddp::ReducerOptions;
using ddp::test::FakeChannel;
using ddp::test::FakeProcessGroup;

namespace {

at::Tensor parameter(std::vector<float> values) {
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

bool same_bits(const at::Tensor& left, const at::Tensor& right) { return at::equal(left, right); }

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

}  // namespace

TEST_CASE("gradients are multiplied by 1/W once, not divided by W") {
  Fixture fixture(3);
  const auto weight = fixture.add("weight", {0.1F, 0.7F, 1.3F, 5.0F, 11.0F, 3e-39F});
  const auto input = at::tensor({1.1F, 0.9F, 7.7F, 1.0F / 3, 12345.678F, 1.0F});
  fixture.group->reduce = [](at::Tensor& /*tensor*/) {};
  fixture.make();
  // Copied in, then in place: the same bits both times.
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(/*set_to_none=*/step == 1);
    fixture.forward();
    (weight * input).sum().backward();
    CHECK(same_bits(weight.grad(), input * static_cast<float>(1.0 / 3)));
  }
  CHECK_FALSE(same_bits(weight.grad(), input / 3));
}

TEST_CASE("nothing is communicated while the reducer does not synchronise") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.reducer->set_synchronize(false);
  (weight * 2).sum().backward();
  CHECK(fixture.group->works.empty());
  CHECK(weight.grad().item<float>() == 2.0F);
  (weight * 3).sum().backward();
  CHECK(fixture.group->works.empty());
  fixture.reducer->set_synchronize(true);
  (weight * 4).sum().backward();
  CHECK(fixture.group->works.size() == 1);
  CHECK(weight.grad().item<float>() == 9.0F);
}

TEST_CASE("buckets are launched in index order whatever order they become ready in") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;  // size limits hold from the first pass
  fixture.options.first_bucket_cap = fixture.options.bucket_cap = 1;
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F, 1.0F});
  const auto c = fixture.add("c", {1.0F, 1.0F, 1.0F});
  fixture.make();
  CHECK(fixture.reducer->bucket_assignment() == ddp::BucketAssignment{{2}, {1}, {0}});
  for (const bool c_last : {true, false}) {
    fixture.group->sent.clear();
    fixture.zero_grad(true);
    fixture.forward();
    // The engine runs what was recorded last first.
    const auto first = c_last ? (c * 1).sum() : (a * 3).sum();
    const auto second = (b * 2).sum();
    const auto third = c_last ? (a * 3).sum() : (c * 1).sum();
    (first + second + third).backward();
    REQUIRE(fixture.group->sent.size() == 4);  // and the map of used parameters
    CHECK(fixture.group->sent[0].numel() == 3);
    CHECK(fixture.group->sent[1].numel() == 2);
    CHECK(fixture.group->sent[2].numel() == 1);
    CHECK(b.grad()[1].item<float>() == 2.0F);
  }
}

TEST_CASE("the layout is rebuilt once, in rank 0's order of readiness, with a small first bucket") {
  Fixture fixture;
  fixture.options.first_bucket_cap = 4;
  fixture.options.bucket_cap = 8;
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  const auto c = fixture.add("c", {1.0F});
  fixture.make();
  CHECK(fixture.reducer->bucket_assignment() == ddp::BucketAssignment{{0, 1, 2}});
  const auto step = [&] {
    fixture.zero_grad(true);
    fixture.forward();
    // The engine runs what was recorded last first: c, then a, then b.
    const auto first = (b * 1).sum();
    const auto second = (a * 2).sum();
    const auto third = (c * 3).sum();
    (first + second + third).backward();
    CHECK(b.grad().item<float>() == 1.0F);
    CHECK(a.grad().item<float>() == 2.0F);
    CHECK(c.grad().item<float>() == 3.0F);
  };
  step();
  CHECK(fixture.group->broadcasts == 0);
  SECTION("this rank's order is rank 0's") {
    step();
    CHECK(fixture.reducer->bucket_assignment() == ddp::BucketAssignment{{2}, {0, 1}});
  }
  SECTION("rank 0 found another order") {
    fixture.group->on_broadcast = [&](at::Tensor& tensor) {
      tensor.copy_(tensor.numel() == 4 ? at::tensor({1, 2, 0, 2}, at::kInt)
                                       : at::tensor({1, 2}, at::kInt));
    };
    step();
    CHECK(fixture.reducer->bucket_assignment() == ddp::BucketAssignment{{1}, {2, 0}});
  }
  CHECK(fixture.group->broadcasts == 2);
  step();
  CHECK(fixture.group->broadcasts == 2);
}

TEST_CASE("late completions in any order are waited for before backward returns") {
  Fixture fixture;
  fixture.options.first_bucket_cap = fixture.options.bucket_cap = 1;
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  const auto c = fixture.add("c", {1.0F});
  fixture.group->late = true;
  fixture.group->reversed = GENERATE(false, true);
  fixture.group->reduce = [](at::Tensor& tensor) { tensor.add_(100); };
  fixture.make();
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(step % 2 == 0);
    fixture.forward();
    (a * 2 + b * 4 + c * 6).sum().backward();
    CHECK(a.grad().item<float>() == 101.0F);
    CHECK(b.grad().item<float>() == 102.0F);
    CHECK(c.grad().item<float>() == 103.0F);
  }
  CHECK(fixture.group->works.size() == 1 + 3 + 3);
}

TEST_CASE(
    "an unused parameter is an error of the same backward, which names it; the next step is "
    "clean") {
  Fixture fixture;
  const auto used = fixture.add("net.used", {1.0F});
  const auto unused = fixture.add("net.unused", {1.0F});
  fixture.make();
  fixture.forward();
  REQUIRE_THROWS_WITH((used * 2).sum().backward(),
                      contains("this backward pass gave no gradient to:\n  net.unused\n") &&
                          !contains("net.used\n") && contains("find_unused_parameters(true)"));
  // Every rank failed: the one bucket was completed on the wire all the same.
  CHECK(fixture.group->works.size() == 1);
  CHECK_FALSE(fixture.channel->aborted);
  fixture.zero_grad(true);
  fixture.forward();
  (used * 2 + unused * 3).sum().backward();
  CHECK(used.grad().item<float>() == 2.0F);
  CHECK(unused.grad().item<float>() == 3.0F);
}

TEST_CASE("a pass that fails on this rank only ends the group, and later passes say so") {
  Fixture fixture;
  const auto used = fixture.add("used", {1.0F});
  fixture.add("unused", {1.0F});
  fixture.channel->others_failed_too = false;
  fixture.make();
  fixture.forward();
  REQUIRE_THROWS_AS((used * 2).sum().backward(), ddp::UsageError);
  CHECK(fixture.channel->aborted);
  CHECK(fixture.group->works.empty());
  REQUIRE_THROWS_AS(fixture.forward(), ddp::CommunicationError);
  REQUIRE_THROWS_WITH(fixture.forward(), contains("unused") && contains("destroy_process_group"));
}

TEST_CASE(
    "an exception in the middle of backward keeps its type, ends the pass, and leaves the engine "
    "usable") {
  Fixture fixture;
  fixture.options.first_bucket_cap = fixture.options.bucket_cap = 1;
  const auto early = fixture.add("early", {1.0F});
  const auto late = fixture.add("late", {1.0F});
  fixture.make();
  const auto pass = [&](bool throwing) {
    fixture.zero_grad(true);
    fixture.forward();
    auto hidden = early * 2;
    if (throwing) {
      hidden = Throwing::apply(hidden);
    }
    (hidden * late).sum().backward();
  };
  pass(false);
  SECTION("alike on all ranks: what was begun is completed, and the next step is clean") {
    fixture.group->works.clear();
    REQUIRE_THROWS_AS(pass(true), std::domain_error);
    CHECK(fixture.channel->failed_passes == std::vector<std::uint64_t>{2});
    CHECK_FALSE(fixture.channel->aborted);
    CHECK(fixture.group->works.size() == 2);
    pass(false);
    CHECK(late.grad().item<float>() == 2.0F);
    CHECK(early.grad().item<float>() == 2.0F);
  }
  SECTION("on this rank only: it leaves the group") {
    fixture.channel->others_failed_too = false;
    REQUIRE_THROWS_AS(pass(true), std::domain_error);
    CHECK(fixture.channel->aborted);
    CHECK(fixture.channel->reports.back().find("exception") != std::string::npos);
    REQUIRE_THROWS_AS(pass(false), ddp::CommunicationError);
  }
}

TEST_CASE(
    "a failed completion is a CommunicationError that names the bucket and what the others said") {
  Fixture fixture;
  fixture.options.first_bucket_cap = fixture.options.bucket_cap = 1;
  const auto a = fixture.add("first.weight", {1.0F});
  const auto b = fixture.add("second.weight", {1.0F});
  fixture.group->late = true;
  fixture.make();
  const auto pass = [&] {
    fixture.zero_grad(true);
    fixture.forward();
    (a * b).sum().backward();
  };
  pass();
  fixture.group->fail_at = 2;
  REQUIRE_THROWS_AS(pass(), ddp::CommunicationError);
  CHECK(fixture.channel->aborted);
  CHECK_THAT(fixture.channel->reports.back(),
             contains("the all-reduce of bucket 1 of 2 (first.weight) failed") ||
                 contains("the all-reduce of bucket 1 of 2 (second.weight) failed"));
  CHECK_THAT(fixture.channel->reports.back(), contains("the cable was cut"));
  REQUIRE_THROWS_WITH(pass(), contains("the cable was cut"));
}

TEST_CASE("a failed all-reduce of the used parameters is a CommunicationError that says so") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.group->fail_at = 1;
  fixture.forward();
  try {
    (weight * 2).sum().backward();
    FAIL("backward succeeded");
  } catch (const ddp::CommunicationError& error) {
    CHECK_THAT(error.what(),
               contains("the all-reduce of the used parameters failed: the cable was cut"));
  }
  CHECK(fixture.channel->aborted);
}

TEST_CASE("a wait for a lost rank that the backend does not end gives up") {
  FakeChannel channel;
  channel.lost = true;
  const auto work = c10::make_intrusive<ddp::test::FakeWork>(at::ones({1}), [] {});
  REQUIRE_THROWS_WITH(ddp::detail::watched_wait(*work, &channel),
                      contains("a rank that takes part in it has left"));
  CHECK(channel.ended_operations == 1);
}

TEST_CASE("a refused launch is a CommunicationError of the same backward") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.group->refuse = true;
  fixture.forward();
  REQUIRE_THROWS_AS((weight * 2).sum().backward(), ddp::CommunicationError);
  CHECK(fixture.channel->aborted);
}

TEST_CASE(
    "a gradient is an alias of its bucket: copied once, never back, and both modes of zero_grad "
    "work") {
  Fixture fixture;
  fixture.options.gradient_as_bucket_view = GENERATE(false, true);
  const auto a = fixture.add("a", {1.0F, 2.0F});
  const auto b = fixture.add("b", {1.0F});
  fixture.make();
  const void* storage = nullptr;
  for (int step = 0; step < 6; ++step) {
    fixture.zero_grad(/*set_to_none=*/step % 2 == 1);  // detach_() must not throw on it
    fixture.forward();
    ((a * 2).sum() + (b * 5).sum()).backward();
    CHECK(same_bits(a.grad(), at::tensor({2.0F, 2.0F})));
    CHECK(b.grad().item<float>() == 5.0F);
    CHECK(a.grad().storage().data() == fixture.group->works.back()->tensor.storage().data());
    CHECK(b.grad().storage().data() == a.grad().storage().data());
    CHECK_FALSE(a.grad().is_view());
    if (step >=
        1) {  // the layout is rebuilt at the second forward; from then on nothing is allocated
      CHECK((storage == nullptr || storage == a.grad().storage().data()));
      storage = a.grad().storage().data();
    }
  }
}

TEST_CASE("gradients that the program keeps stay as they are, unless they are bucket views") {
  Fixture fixture;
  fixture.options.gradient_as_bucket_view = GENERATE(false, true);
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  std::vector<at::Tensor> kept;
  for (int step = 1; step <= 5; ++step) {
    fixture.zero_grad(/*set_to_none=*/true);
    fixture.forward();
    (weight * step).sum().backward();
    // Kept as the tensor, or as a view of it.
    kept.push_back(step % 2 == 0 ? weight.grad() : weight.grad().view({1, 1}));
  }
  const bool views = fixture.options.gradient_as_bucket_view;
  for (int step = 1; step <= 5; ++step) {
    // (The first pass's bucket is gone: the layout was rebuilt.)
    const float expected = views && step > 1 ? 5.0F : static_cast<float>(step);
    CHECK(kept[step - 1].item<float>() == expected);
  }
}

TEST_CASE("accumulated local gradients are averaged with the first synchronising pass") {
  Fixture fixture;
  fixture.options.gradient_as_bucket_view = GENERATE(false, true);
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.group->reduce = [](at::Tensor& tensor) { tensor.add_(10); };  // the other rank's half
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(/*set_to_none=*/true);
    fixture.reducer->prepare_for_forward();
    fixture.reducer->set_synchronize(false);
    (weight * 2).sum().backward();
    (weight * 4).sum().backward();
    fixture.forward();
    (weight * 6).sum().backward();
    CHECK(weight.grad().item<float>() == 16.0F);
  }
}

TEST_CASE("a gradient set by hand before backward is averaged with it") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.forward();
  (weight * 3).sum().backward();
  weight.mutable_grad() = at::tensor({100.0F});
  fixture.forward();
  (weight * 3).sum().backward();
  CHECK(weight.grad().item<float>() == 103.0F);
}

TEST_CASE("two backwards of two forwards, and of one retained graph, are each reduced") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.forward();
  const auto first = (weight * 2).sum();
  fixture.forward();
  const auto second = (weight * 3).sum();
  first.backward({}, /*retain_graph=*/true);
  CHECK(fixture.group->works.size() == 1);
  second.backward();
  CHECK(fixture.group->works.size() == 2);
  first.backward();
  CHECK(fixture.group->works.size() == 3);
  CHECK(weight.grad().item<float>() == 7.0F);
}

TEST_CASE("a hook that fires with an undefined gradient counts as unused") {
  Fixture fixture;
  fixture.options.find_unused_parameters = GENERATE(false, true);
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  fixture.make();
  std::vector<std::vector<int>> maps;
  fixture.forward();
  (a * 2 + NoGradient::apply(b)).sum().backward();
  CHECK(a.grad().item<float>() == 2.0F);
  if (fixture.options.find_unused_parameters) {
    CHECK_FALSE(b.grad().defined());
    CHECK(same_bits(fixture.group->sent.back(), at::tensor({1, 0}, at::kInt)));
  } else {
    CHECK(b.grad().item<float>() == 0.0F);  // the other ranks may have one: zeros contribute
  }
}

TEST_CASE("with unused parameters allowed, one that no rank used keeps its gradient untouched") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  fixture.options.gradient_as_bucket_view = GENERATE(false, true);
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  fixture.make();
  fixture.forward();
  (a * 2).sum().backward();
  CHECK_FALSE(b.grad().defined());
  fixture.zero_grad(true);
  fixture.forward();
  (a * 2 + b * 3).sum().backward();
  CHECK(b.grad().item<float>() == 3.0F);
  // Not zeroed: b's gradient is now a slot of the bucket, and stays what it was.
  fixture.forward();
  (a * 2).sum().backward();
  CHECK(a.grad().item<float>() == 4.0F);
  CHECK(b.grad().item<float>() == 3.0F);
}

TEST_CASE(
    "with unused parameters allowed, one that another rank used gets the average with zeros") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  fixture.group->reduce = [](at::Tensor& tensor) {
    tensor.add_(tensor.scalar_type() == at::kInt ? 1 : 10);
  };
  fixture.make();
  fixture.forward();
  (a * 2).sum().backward();
  CHECK(a.grad().item<float>() == 11.0F);
  CHECK(b.grad().item<float>() == 10.0F);
}

TEST_CASE("a parameter used only in local passes counts as used in the synchronising one") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  const auto a = fixture.add("a", {1.0F});
  const auto b = fixture.add("b", {1.0F});
  fixture.make();
  fixture.forward();
  fixture.reducer->set_synchronize(false);
  (a * 2).sum().backward();
  fixture.forward();
  (b * 3).sum().backward();
  CHECK(same_bits(fixture.group->sent.back(), at::tensor({1, 1}, at::kInt)));
  CHECK(a.grad().item<float>() == 2.0F);
  CHECK(b.grad().item<float>() == 3.0F);
  fixture.zero_grad(true);
  fixture.forward();
  (b * 3).sum().backward();
  CHECK(same_bits(fixture.group->sent.back(), at::tensor({0, 1}, at::kInt)));
}

TEST_CASE("a re-entrant checkpoint keeps the pass open until the outer backward ends") {
  Fixture fixture;
  const auto outer = fixture.add("outer", {1.0F});
  const auto inner = fixture.add("inner", {1.0F});
  const auto input = fixture.add("input", {1.0F});
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> body = [&](const at::Tensor& x) {
    return x * inner * 3;
  };
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(step == 1);
    fixture.forward();
    (Checkpoint::apply(input * 2, &body) * outer).sum().backward();
    CHECK(inner.grad().item<float>() == 6.0F);
    CHECK(outer.grad().item<float>() == 6.0F);
    CHECK(input.grad().item<float>() == 6.0F);
    CHECK(fixture.reducer->finished_passes() == static_cast<std::uint64_t>(step + 1));
  }
}

TEST_CASE(
    "a parameter used in several re-entrant checkpoints is reduced with the sum of its gradients") {
  Fixture fixture;
  fixture.add("last", {1.0F});
  const auto shared = fixture.add("shared", {1.0F});
  const auto last = fixture.parameters.front().tensor;
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> body = [&](const at::Tensor& x) {
    return x * shared * 3;
  };
  fixture.forward();
  // The shared parameter's hook fires twice; its bucket waits for `last`.
  (Checkpoint::apply(Checkpoint::apply(last * 1, &body), &body)).sum().backward();
  CHECK(shared.grad().item<float>() == 18.0F);
  CHECK(last.grad().item<float>() == 9.0F);
  CHECK(fixture.group->works.size() == 1);
}

TEST_CASE("a second gradient after the bucket was sent is an error that names the parameter") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  fixture.options.first_bucket_cap = fixture.options.bucket_cap = 1;
  const auto last = fixture.add("last", {1.0F});
  const auto shared = fixture.add("shared", {1.0F});
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> body = [&](const at::Tensor& x) {
    return x * shared * 3;
  };
  fixture.forward();
  REQUIRE_THROWS_WITH(
      (Checkpoint::apply(Checkpoint::apply(last * 1, &body), &body)).sum().backward(),
      contains("a gradient for shared came a second time in this backward pass"));
  fixture.zero_grad(true);
  fixture.forward();
  (last * shared).sum().backward();
  CHECK(shared.grad().item<float>() == 1.0F);
}

TEST_CASE("a pass that only a nested backward fed is found at the next forward") {
  Fixture fixture;
  const auto inner = fixture.add("inner", {1.0F});
  fixture.add("skipped", {1.0F});
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> body = [&](const at::Tensor& x) {
    return x * inner;
  };
  const auto input = at::tensor({1.0F}).set_requires_grad(true);
  fixture.forward();
  Checkpoint::apply(input * 2, &body).sum().backward();
  REQUIRE_THROWS_WITH(fixture.forward(),
                      contains("the backward pass before this forward did not end") &&
                          contains("\n  skipped\n") && contains("checkpoint"));
  fixture.forward();  // and is over then
}

TEST_CASE("under create_graph the gradient keeps its graph and has the averaged values") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {3.0F});
  fixture.group->reduce = [](at::Tensor& tensor) { tensor.add_(10); };
  fixture.make();
  fixture.forward();
  (weight * weight).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  CHECK(weight.grad().requires_grad());
  CHECK(weight.grad().item<float>() == 13.0F);
}

TEST_CASE("layouts and dtypes: channels_last, a permuted matrix, half, complex, zero-size") {
  Fixture fixture;
  const auto add = [&](const std::string& name, at::Tensor tensor) {
    fixture.parameters.push_back({name, tensor.detach().set_requires_grad(true)});
    return fixture.parameters.back().tensor;
  };
  const auto image =
      add("image", at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  const auto matrix = add("matrix", at::rand({4, 3}).t());
  const auto half = add("half", at::rand({5}).to(at::kHalf));
  const auto complex = add("complex", at::rand({3}, at::kComplexFloat));
  const auto empty = add("empty", at::rand({0, 3}));
  fixture.make();
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(step == 1);
    fixture.forward();
    const auto loss = (image * 2).sum() + (matrix * 3).sum() + (half * 4).sum().to(at::kFloat) +
                      at::real(complex * complex.conj()).sum() + empty.sum();
    loss.backward();
    CHECK(image.grad().strides() == image.strides());
    CHECK(matrix.grad().strides() == matrix.strides());
    CHECK(same_bits(image.grad(), at::full({2, 3, 4, 5}, 2.0F)));
    CHECK(same_bits(matrix.grad(), at::full({3, 4}, 3.0F)));
    CHECK(same_bits(half.grad(), at::full({5}, 4.0F).to(at::kHalf)));
    CHECK(at::allclose(complex.grad(), 2 * complex));
    CHECK(empty.grad().sizes() == empty.sizes());
  }
}

TEST_CASE("a communication hook replaces the all-reduce; what it returns is the gradient") {
  Fixture fixture;
  const auto a = fixture.add("a", {1.0F, 1.0F});
  fixture.make();
  bool elsewhere = GENERATE(false, true);
  std::vector<std::size_t> seen;
  fixture.reducer->register_comm_hook([&](c10d::GradBucket& bucket) {
    seen.push_back(bucket.getIndex());
    CHECK(bucket.isLast());
    CHECK(bucket.getGradients().size() == 1);
    auto result = elsewhere ? bucket.getBuffer() * 7 : bucket.getBufferRef().mul_(7);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(result);
    return future;
  });
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(step % 2 == 0);
    fixture.forward();
    (a * 2).sum().backward();
    CHECK(same_bits(a.grad(), at::tensor({14.0F, 14.0F})));
  }
  CHECK(seen == std::vector<std::size_t>{0, 0, 0});
  CHECK(fixture.group->works.empty());
  REQUIRE_THROWS_WITH(fixture.reducer->register_comm_hook({}),
                      contains("register_comm_hook: the communication hook is empty"));
  REQUIRE_THROWS_WITH(
      fixture.reducer->register_comm_hook([](c10d::GradBucket& /*bucket*/) { return nullptr; }),
      contains("register_comm_hook: a communication hook is registered already"));
}

TEST_CASE("a communication hook is not taken in the middle of a pass") {
  Fixture fixture;
  const auto early = fixture.add("early", {1.0F});
  const auto late = fixture.add("late", {1.0F});
  fixture.make();
  fixture.forward();
  std::string refusal = "(accepted)";
  const auto hidden = early * 2;
  hidden.register_hook([&](const at::Tensor& /*gradient*/) {
    try {
      fixture.reducer->register_comm_hook([](c10d::GradBucket& /*bucket*/) { return nullptr; });
    } catch (const ddp::UsageError& error) {
      refusal = error.what();
    }
  });
  (hidden * late).sum().backward();
  CHECK_THAT(refusal, contains("register_comm_hook: a backward pass is under way"));
  CHECK(early.grad().item<float>() == 2.0F);
}

TEST_CASE(
    "a communication hook that goes wrong ends backward with an error that names the bucket") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F, 1.0F});
  fixture.make();
  const auto holding = [](c10::IValue value) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
    future->markCompleted(std::move(value));
    return future;
  };
  const auto failing = [] {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->setError(std::make_exception_ptr(std::domain_error("the hook's own words")));
    return future;
  };
  struct Case {
    std::function<c10::intrusive_ptr<c10::ivalue::Future>()> hook;
    std::string words;
  };
  const auto number = GENERATE(range(0, 9));
  const Case wrong =
      std::vector<Case>{
          {[]() -> c10::intrusive_ptr<c10::ivalue::Future> {
             throw std::domain_error("the hook's own words");
           },
           "the hook's own words"},
          {[]() -> c10::intrusive_ptr<c10::ivalue::Future> { throw 5; }, "not a std::exception"},
          {failing, "the hook's own words"},
          {[] { return nullptr; }, "it returned no future"},
          {[&] { return holding(7); }, "the future that it returned holds Int; expected a tensor"},
          {[&] { return holding(at::Tensor()); },
           "the future that it returned holds an undefined tensor"},
          {[&] { return holding(std::vector<at::Tensor>()); }, "an empty list"},
          {[&] { return holding(at::ones({3})); },
           "3 elements of dtype Float (dense); the bucket has 2"},
          {[&] { return holding(at::ones({2}, at::kComplexFloat)); }, "ComplexFloat"},
      }
          .at(static_cast<std::size_t>(number));
  fixture.reducer->register_comm_hook([&](c10d::GradBucket& /*bucket*/) { return wrong.hook(); });
  fixture.forward();
  try {
    (weight * 2).sum().backward();
    FAIL("backward succeeded");
  } catch (const ddp::CommunicationError& error) {
    CHECK_THAT(error.what(), contains("the communication hook for bucket 0 of 1 (weight)") &&
                                 contains(wrong.words) && contains("rank 0"));
  }
  CHECK(!weight.grad().defined());
  CHECK(fixture.channel->aborted);  // so that the peers end too
  REQUIRE_THROWS_AS(fixture.forward(), ddp::CommunicationError);
}

TEST_CASE("a communication hook sees complex gradients as such, and may return other dtypes") {
  Fixture fixture;
  const auto real = fixture.add("real", {1.0F, 1.0F});
  const auto complex = at::rand({3}, at::kComplexFloat).set_requires_grad(true);
  fixture.parameters.push_back({"complex", complex});
  fixture.make();
  fixture.reducer->register_comm_hook([&](c10d::GradBucket& bucket) {
    const bool is_complex = bucket.getBuffer().is_complex();
    CHECK(bucket.getBuffer().numel() == (is_complex ? 3 : 2));
    CHECK(bucket.getGradients().front().is_complex() == is_complex);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    const auto tripled = bucket.getBuffer() * 3;
    future->markCompleted(is_complex ? tripled : tripled.to(at::kHalf));
    return future;
  });
  fixture.forward();
  ((real * 2).sum() + at::real(complex * complex.conj()).sum()).backward();
  CHECK(same_bits(real.grad(), at::tensor({6.0F, 6.0F})));
  CHECK(at::allclose(complex.grad(), 6 * complex));
}

TEST_CASE("the map of used parameters goes after a hook's collectives, which may come late") {
  Fixture fixture;
  fixture.options.find_unused_parameters = true;
  const auto weight = fixture.add("weight", {1.0F, 1.0F});
  fixture.make();
  std::thread late;
  fixture.reducer->register_comm_hook([&](c10d::GradBucket& bucket) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    late = std::thread([&fixture, future, buffer = bucket.getBuffer()] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::vector<at::Tensor> tensors{buffer};
      fixture.group->allreduce(tensors, {});
      future->markCompleted(buffer);
    });
    return future;
  });
  fixture.forward();
  (weight * 2).sum().backward();
  late.join();
  REQUIRE(fixture.group->sent.size() == 2);
  CHECK(fixture.group->sent[0].scalar_type() == at::kFloat);
  CHECK(fixture.group->sent[1].scalar_type() == at::kInt);
}

TEST_CASE("hooks are gone with the reducer") {
  Fixture fixture;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.forward();
  fixture.reducer.reset();
  (weight * 2).sum().backward();
  CHECK(fixture.group->works.empty());
  CHECK(weight.grad().item<float>() == 2.0F);
}
