#include <test/support/catch2.h>
#include <test/unit/reducer_fixture.h>
#include <thread>

#include <ddp/reducer/watched_wait.h>

// The reducer: passes that fail, and communication hooks.

using namespace ddp::test;

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
  REQUIRE_THROWS_WITH(ddp::detail::watched_wait(*work, &channel, ddp::detail::WaitKind::kHost),
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
