#include <csignal>
#include <test/process/models.h>
#include <test/support/catch2.h>

// Communication hooks on forked ranks over Gloo: what goes wrong, and that it ends everywhere.

using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Two;

namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

ddp::DistributedDataParallelOptions many_buckets() {
  return ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6);
}

/// Runs `body`, and leaves the group as a program should: so that rank 0, which serves the store,
/// lets the others read why it failed.
template <class Body>
void then_leave(const Body& body) {
  try {
    body();
  } catch (...) {
    ddp::destroy_process_group();
    throw;
  }
}

Future failed(const std::string& text) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->setError(std::make_exception_ptr(std::runtime_error(text)));
  return future;
}

}  // namespace

TEST_CASE(
    "a hook that throws or fails on one rank: every rank's error names the bucket, in seconds") {
  const bool throws = GENERATE(true, false);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net, many_buckets());
    int calls = 0;
    const auto inner = ddp::comm_hooks::allreduce();
    model->register_comm_hook([&](c10d::GradBucket& bucket) -> Future {
      // One bucket in the first step, two in the others.
      if (rank.rank() == 1 && ++calls == 7) {
        if (throws) {
          throw std::domain_error("no more paper");
        }
        return failed("no more paper");
      }
      return inner(bucket);
    });
    then_leave([&] {
      for (int step = 0; step < 4; ++step) {
        model(scalar_input(rank)).sum().backward();
      }
    });
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "CommunicationError");
    CHECK_THAT(result.error,
               contains("the communication hook for bucket 1 of 2") && contains("no more paper"));
    CHECK(result.seconds < 10);
  }
}

TEST_CASE("a hook that fails on every rank: each says so") {
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net);
    model->register_comm_hook(
        [&](c10d::GradBucket& /*bucket*/) -> Future { throw std::domain_error("no more paper"); });
    model(scalar_input(rank)).sum().backward();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "CommunicationError");
    CHECK_THAT(result.error,
               contains("the communication hook for bucket 0 of 1") && contains("no more paper"));
    CHECK(result.seconds < 10);
  }
}

TEST_CASE(
    "a rank killed while a hook of several steps runs: its peers end in seconds and name it") {
  const bool own_group = GENERATE(false, true);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    torch::nn::Linear layer(16, 16);
    ddp::DistributedDataParallel model(layer, many_buckets());
    const auto hook =
        ddp::comm_hooks::power_sgd(ddp::comm_hooks::PowerSGDOptions().start_power_sgd_iter(2),
                                   own_group ? ddp::new_group({}) : ddp::ProcessGroup());
    int calls = 0;
    model->register_comm_hook([&](c10d::GradBucket& bucket) {
      if (rank.rank() == 1 && ++calls == 10) {
        raise(SIGKILL);
      }
      return hook(bucket);
    });
    then_leave([&] {
      for (int step = 0; step < 10; ++step) {
        model->forward(at::ones({2, 16})).sum().backward();
      }
    });
  });
  INFO(summary(results));
  CHECK(results[1].status == 128 + SIGKILL);
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("the communication hook for bucket") &&
                                        (contains("rank 1") || contains("ranks 1")));
    CHECK(results[rank].seconds < 15);
  }
}

TEST_CASE("a PowerSGD hook that serves two models is an error that says so") {
  const auto results = run_ranks(2, [&](const Rank& /*rank*/) {
    start(std::chrono::seconds(60));
    torch::nn::Linear small(8, 8);
    torch::nn::Linear large(16, 16);
    ddp::DistributedDataParallel one(small);
    ddp::DistributedDataParallel two(large);
    const auto hook =
        ddp::comm_hooks::power_sgd(ddp::comm_hooks::PowerSGDOptions().start_power_sgd_iter(2));
    one->register_comm_hook(hook);
    two->register_comm_hook(hook);
    then_leave([&] {
      for (int step = 0; step < 4; ++step) {
        one->forward(at::ones({2, 8})).sum().backward();
        two->forward(at::ones({2, 16})).sum().backward();
      }
    });
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.error_type == "CommunicationError");
    CHECK_THAT(result.error, contains("the bucket has 272 elements and had 72 in the step before: "
                                      "the hook serves two models"));
  }
}

TEST_CASE("hooks refuse what cannot work") {
  const auto results = run_ranks(2, [&](const Rank& rank) {
    using namespace ddp::comm_hooks;
    const auto refused = [](const std::string& word, const std::function<void()>& act) {
      try {
        act();
      } catch (const ddp::UsageError& error) {
        return std::string(error.what()).find(word) != std::string::npos;
      }
      return false;
    };
    RANK_CHECK(refused("init_process_group", [] { fp16_compress(); }));
    start();
    RANK_CHECK(refused("matrix_approximation_rank is 0; it must be at least 1",
                       [] { power_sgd(PowerSGDOptions().matrix_approximation_rank(0)); }));
    RANK_CHECK(refused("start_power_sgd_iter is 1; with use_error_feedback or warm_start",
                       [] { batched_power_sgd(PowerSGDOptions().start_power_sgd_iter(1)); }));
    RANK_CHECK(refused("random_seed is -1; it must be from 0 to 4294967295",
                       [] { power_sgd(PowerSGDOptions().random_seed(-1)); }));
    RANK_CHECK(refused("orthogonalization_epsilon is -1; it must not be negative",
                       [] { power_sgd(PowerSGDOptions().orthogonalization_epsilon(-1)); }));
    RANK_CHECK(refused("quantization_per_channel: channel_size is 0; it must be positive", [] {
      quantization_per_channel(QuantizationPerChannelOptions().channel_size(0));
    }));
    RANK_CHECK(refused("fp16_compress_wrapper: the hook to wrap is empty",
                       [] { fp16_compress_wrapper({}); }));
    RANK_CHECK(refused("register_comm_hook: the c10d::CommHookInterface is null",
                       [] { from_native(nullptr); }));
    RANK_CHECK(refused("PeriodicModelAverager: period is 0; it must be at least 1",
                       [] { ddp::PeriodicModelAverager averager(0); }));
    RANK_CHECK(refused("PeriodicModelAverager: warmup_steps is -1; it must not be negative", [] {
      ddp::PeriodicModelAverager averager(ddp::PeriodicModelAveragerOptions(1).warmup_steps(-1));
    }));
    const auto first = ddp::new_group({0});
    RANK_CHECK(rank.rank() == 0 || refused("", [&] { allreduce(first); }));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}
