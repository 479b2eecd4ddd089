#include <memory>
#include <test/support/catch2.h>
#include <test/support/fake_process_group.h>

#include <ATen/ATen.h>

#include <ddp/comm_hooks/hook_worker.h>
#include <ddp/comm_hooks/low_rank.h>

using ddp::comm_hooks::detail::fill_randomly;
using ddp::comm_hooks::detail::orthogonalize;
using ddp::comm_hooks::detail::StartSeeds;

TEST_CASE("seeds are NumPy's: RandomState(seed).randint(1000000000)") {
  StartSeeds zero(0);
  for (const std::uint32_t expected : {209652396U, 398764591U, 924231285U, 404868288U, 441365315U,
                                       463622907U, 192771779U, 417693031U}) {
    CHECK(zero.next() == expected);
  }
  CHECK(StartSeeds(1).next() == 717354021U);
  CHECK(StartSeeds(42).next() == 534895718U);
  CHECK(StartSeeds(4294967295U).next() == 419326371U);
}

TEST_CASE("random starts leave the program's generator alone, and repeat") {
  at::manual_seed(5);
  const auto expected = at::rand({3});
  at::manual_seed(5);
  const auto first = at::empty({2, 5, 3});
  const auto second = at::empty({2, 5, 3});
  fill_randomly(first, StartSeeds(0).next_generator());
  fill_randomly(second, StartSeeds(0).next_generator());
  CHECK(at::equal(at::rand({3}), expected));
  CHECK(at::equal(first, second));
  CHECK(first.std().item<float>() > 0.5F);
}

TEST_CASE("columns become orthonormal, by Gram-Schmidt and by QR") {
  const auto rank = GENERATE(1, 2, 3, 4);
  const auto matrices = at::randn({3, 7, rank});
  const auto before = matrices.clone();
  orthogonalize(matrices, 0);
  const auto identity = at::eye(rank).expand({3, rank, rank});
  CHECK(at::allclose(at::bmm(matrices.transpose(1, 2), matrices), identity, 1e-5, 1e-5));
  // The same space: projecting the old columns on the new ones loses nothing.
  const auto projected = at::bmm(matrices, at::bmm(matrices.transpose(1, 2), before));
  CHECK(at::allclose(projected, before, 1e-4, 1e-4));
}

TEST_CASE("columns of zeros stay zeros instead of becoming NaN") {
  const auto epsilon = GENERATE(0.0, 1e-8);
  const auto matrices = at::zeros({2, 4, 2});
  matrices[1].fill_(1);
  orthogonalize(matrices, epsilon);
  CHECK(at::equal(matrices[0], at::zeros({4, 2})));
  CHECK(at::isfinite(matrices).all().item<bool>());
}

TEST_CASE("a hook's worker that is destroyed ends its job, and the job's future says so") {
  const auto never = c10::make_intrusive<ddp::test::FakeWork>(at::ones({1}), [] {});
  auto worker = std::make_unique<ddp::comm_hooks::detail::HookWorker>();
  const auto buffer = at::ones({1});
  const auto future = worker->run(buffer, [&running = *worker, never, buffer] {
    running.wait(*never);
    return buffer;
  });
  worker.reset();
  REQUIRE(future->hasError());
  CHECK_THAT(future->tryRetrieveErrorMessage(),
             contains("the communication hook was destroyed while it ran"));
}
