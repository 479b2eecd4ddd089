#include <test/support/catch2.h>
#include <test/unit/reducer_fixture.h>

// The reducer's passes and gradients.

using namespace ddp::test;

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
