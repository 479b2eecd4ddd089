#include <test/support/catch2.h>
#include <test/unit/reducer_fixture.h>

// The reducer: nested backwards, graphs of gradients, static graphs.

using namespace ddp::test;

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
      contains("shared") && contains("second time"));
  fixture.zero_grad(true);
  fixture.forward();
  (last * shared).sum().backward();
  CHECK(shared.grad().item<float>() == 1.0F);
}

TEST_CASE("a pass that only a nested backward fed ends with the outer one, where its errors are") {
  Fixture fixture;
  const auto inner = fixture.add("inner", {1.0F});
  fixture.add("skipped", {1.0F});
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> body = [&](const at::Tensor& x) {
    return x * inner;
  };
  const auto input = at::tensor({1.0F}).set_requires_grad(true);
  fixture.forward();
  REQUIRE_THROWS_WITH(Checkpoint::apply(input * 2, &body).sum().backward(), contains("skipped"));
  fixture.zero_grad(true);
  fixture.forward();
  Checkpoint::apply(input * 2 * fixture.parameters.back().tensor, &body).sum().backward();
  CHECK(inner.grad().item<float>() == 2.0F);
  CHECK(fixture.reducer->finished_passes() == 1);
}

TEST_CASE("a whole model in nested checkpoints is reduced within its backward, each time") {
  Fixture fixture;
  const auto inner = fixture.add("inner", {2.0F});
  const auto outer = fixture.add("outer", {3.0F});
  fixture.make();
  std::function<at::Tensor(const at::Tensor&)> inner_body = [&](const at::Tensor& x) {
    return x * inner;
  };
  std::function<at::Tensor(const at::Tensor&)> outer_body = [&](const at::Tensor& x) {
    return Checkpoint::apply(x * outer, &inner_body);
  };
  const auto input = at::tensor({1.0F}).set_requires_grad(true);
  for (int step = 0; step < 3; ++step) {
    fixture.zero_grad(true);
    fixture.forward();
    const auto loss = Checkpoint::apply(input * 1, &outer_body).sum();
    loss.backward({}, /*retain_graph=*/true);
    CHECK(inner.grad().item<float>() == 3.0F);
    CHECK(outer.grad().item<float>() == 2.0F);
    loss.backward();
    CHECK(inner.grad().item<float>() == 6.0F);
    CHECK(fixture.reducer->finished_passes() == 2 * static_cast<std::uint64_t>(step + 1));
  }
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
  fixture.zero_grad(true);  // the gradient's graph refers to the weight, which refers to it
}

namespace {

/// Three parameters, each in a bucket of its own once the layout is known.
struct StaticGraph : Fixture {
  at::Tensor a = add("a", {1.0F});
  at::Tensor b = add("b", {1.0F});
  at::Tensor never = add("never", {1.0F});
  std::function<at::Tensor(const at::Tensor&)> body = [this](const at::Tensor& x) {
    return x * b * 3;
  };

  StaticGraph() {
    options.static_graph = true;
    options.first_bucket_cap = options.bucket_cap = 1;
    make();
  }

  /// `b` in `times` re-entrant checkpoints, and `a`, whose gradient comes last.
  void pass(int times) {
    zero_grad(true);
    forward();
    auto x = a * 1;
    for (int i = 0; i < times; ++i) {
      x = Checkpoint::apply(x, &body);
    }
    x.sum().backward();
  }
};

}  // namespace

TEST_CASE("static graph: a parameter in several checkpoints is reduced once, when it is complete") {
  StaticGraph fixture;
  for (int step = 0; step < 4; ++step) {
    fixture.group->sent.clear();
    fixture.pass(2);
    CHECK(fixture.b.grad().item<float>() == 18.0F);
    CHECK(fixture.a.grad().item<float>() == 9.0F);
    CHECK_FALSE(fixture.never.grad().defined());
    // The first pass: the map of used parameters, then one bucket for all.
    const std::size_t expected[] = {2, 1, 3, 3};
    CHECK(fixture.group->sent.size() == expected[step]);
  }
  CHECK(fixture.reducer->bucket_assignment() == ddp::BucketAssignment{{1}, {0}, {2}});
}

TEST_CASE("static graph: a bucket is sent as soon as its last gradient is there") {
  StaticGraph fixture;
  fixture.pass(2);
  fixture.pass(2);
  std::size_t sent_before_a = 0;
  fixture.zero_grad(true);
  fixture.forward();
  fixture.group->sent.clear();
  auto x = fixture.a * 1;
  x.register_hook([&](const at::Tensor&) { sent_before_a = fixture.group->sent.size(); });
  Checkpoint::apply(Checkpoint::apply(x, &fixture.body), &fixture.body).sum().backward();
  CHECK(sent_before_a == 1);
}

TEST_CASE("static graph: another graph is an error of the same backward, which names it") {
  StaticGraph fixture;
  fixture.pass(1);
  SECTION("a gradient too many") {
    REQUIRE_THROWS_WITH(fixture.pass(2), contains("not static") && contains("b more than the 1"));
  }
  SECTION("a gradient where there was none") {
    fixture.zero_grad(true);
    fixture.forward();
    REQUIRE_THROWS_WITH((fixture.a * fixture.b * fixture.never).sum().backward(),
                        contains("not static") && contains("never more than the 0 gradients"));
  }
  SECTION("a gradient too few") {
    REQUIRE_THROWS_WITH(fixture.pass(0), contains("fewer gradients") && contains("b"));
  }
  // Every rank failed alike.
  fixture.pass(1);
  CHECK(fixture.b.grad().item<float>() == 3.0F);
}

TEST_CASE("static graph: a first pass that fails teaches nothing") {
  StaticGraph fixture;
  fixture.forward();
  REQUIRE_THROWS_AS(Throwing::apply(fixture.a * fixture.b).sum().backward(), std::domain_error);
  fixture.zero_grad(true);
  fixture.forward();
  REQUIRE_THROWS_AS((Throwing::apply(fixture.a * 1) * fixture.b).sum().backward(),
                    std::domain_error);
  fixture.pass(1);
  fixture.pass(1);
  CHECK(fixture.b.grad().item<float>() == 3.0F);
}

TEST_CASE("static graph: a parameter that only another rank uses gets the average, in each pass") {
  StaticGraph fixture;
  fixture.group->reduce = [](at::Tensor& tensor) { tensor.add_(1); };
  for (int step = 0; step < 4; ++step) {
    fixture.pass(1);
    CHECK(fixture.never.grad().item<float>() == 1.0F);
    CHECK(fixture.b.grad().item<float>() == 2.5F);
  }
}

TEST_CASE("static graph: gradients of local passes are averaged with the first reduced one") {
  StaticGraph fixture;
  fixture.forward();
  fixture.reducer->set_synchronize(false);
  (fixture.a * fixture.never).sum().backward();
  fixture.forward();
  (fixture.a * fixture.b).sum().backward();
  CHECK(fixture.group->sent.size() == 2);
  CHECK(same_bits(fixture.group->sent.front(), at::tensor({1, 1, 1}, at::kInt)));
  CHECK(fixture.never.grad().item<float>() == 1.0F);
  CHECK(fixture.a.grad().item<float>() == 2.0F);
}

TEST_CASE("a pass in which this rank stands aside sends zeros and changes no gradient here") {
  Fixture fixture;
  fixture.options.find_unused_parameters = GENERATE(false, true);
  fixture.options.gradient_as_bucket_view = true;
  const auto weight = fixture.add("weight", {1.0F, 1.0F});
  fixture.make();
  fixture.forward();
  (weight * 2).sum().backward();
  fixture.group->sent.clear();
  fixture.group->reduce = [](at::Tensor& tensor) { tensor.add_(5); };
  fixture.reducer->shadow_pass();
  REQUIRE(fixture.group->sent.size() == (fixture.options.find_unused_parameters ? 2U : 1U));
  CHECK(same_bits(fixture.group->sent.front(), at::zeros({2})));
  CHECK(same_bits(weight.grad(), at::full({2}, 2.0F)));
  CHECK(fixture.reducer->finished_passes() == 2);
}

TEST_CASE("what is announced before a pass decides the divisor, and may refuse the pass") {
  Fixture fixture(4);
  const auto weight = fixture.add("weight", {1.0F});
  fixture.group->reduce = [](at::Tensor& /*tensor*/) {};
  fixture.make();
  fixture.forward();
  fixture.reducer->set_before_pass([] { return 2; });
  (weight * 3).sum().backward();
  CHECK(weight.grad().item<float>() == 1.5F);
  fixture.reducer->set_before_pass([]() -> int { throw std::domain_error("not now"); });
  REQUIRE_THROWS_AS((weight * 3).sum().backward(), std::domain_error);
  fixture.reducer->set_before_pass({});
  fixture.zero_grad(true);
  fixture.forward();
  (weight * 3).sum().backward();
  CHECK(weight.grad().item<float>() == 0.75F);
}

TEST_CASE("python_compatible refuses a second backward after one forward") {
  Fixture fixture;
  fixture.options.python_compatible = true;
  const auto weight = fixture.add("weight", {1.0F});
  fixture.make();
  fixture.forward();
  const auto loss = (weight * 3).sum();
  loss.backward({}, /*retain_graph=*/true);
  REQUIRE_THROWS_WITH(loss.backward(), contains("second backward") && contains("no_sync"));
  fixture.zero_grad(true);
  fixture.forward();
  (weight * 3).sum().backward();
  CHECK(weight.grad().item<float>() == 3.0F);
}
