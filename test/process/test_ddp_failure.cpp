#include <csignal>
#include <cstdlib>
#include <test/process/models.h>
#include <test/support/catch2.h>
#include <thread>

// DistributedDataParallel on forked ranks over Gloo: backward passes that fail. See also
// test_faults.cpp.

using ddp::test::InBackward;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::scalar_input;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::ThrowOnRank;
using ddp::test::Two;

TEST_CASE(
    "an exception in one rank's backward, caught there: its peers end in seconds, with its words") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    for (int step = 0; step < 3; ++step) {
      const auto x = scalar_input(rank);
      const auto hidden = net->a(x);
      const bool throws = step == 2 && rank.rank() == 1;
      model(x, false, true);  // decides that the backward synchronises
      try {
        net->b(ThrowOnRank::apply(hidden, throws)).sum().backward();
      } catch (const std::domain_error&) {
        // The erring process stays alive; its next step is refused.
        bool refused = false;
        try {
          model(x);
        } catch (const ddp::CommunicationError&) {
          refused = true;
        }
        RANK_CHECK(refused);
        std::this_thread::sleep_for(std::chrono::seconds(8));
        return;
      }
    }
  });
  INFO(summary(results));
  CHECK(results[1].status == 0);
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error,
               contains("rank 1") && contains("an exception ended its backward pass"));
    CHECK(results[rank].seconds < 8);
  }
}

TEST_CASE("rank 0 alone fails a pass and is gone at once: the others have read why all the same") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net);
    model(scalar_input(rank), true, true).sum().backward();
    try {
      model(scalar_input(rank), true, rank.rank() != 0).sum().backward();
    } catch (const ddp::UsageError&) {
      std::_Exit(rank.rank() == 0 ? 3 : 4);  // and with it the store
    }
  });
  INFO(summary(results));
  CHECK(results[0].status == 3);
  for (const int rank : {1, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("rank 0 left:") && contains("b.weight"));
  }
}

TEST_CASE("an exception in every rank's backward: the next step is clean") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    for (int step = 0; step < 6; ++step) {
      net->zero_grad(step % 2 == 0);
      const auto x = scalar_input(rank);
      const auto hidden = net->a(x);
      model(x, false, true);
      bool thrown = false;
      try {
        net->b(ThrowOnRank::apply(hidden, step % 3 == 2)).sum().backward();
        RANK_CHECK(net->a->weight.grad().item<float>() == 1.5F);
        RANK_CHECK(net->b->weight.grad().item<float>() == 1.5F);
      } catch (const std::domain_error&) {
        thrown = true;
      }
      RANK_CHECK(thrown == (step % 3 == 2));
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
}

TEST_CASE(
    "a parameter unused on one rank only: that rank's error names it, its peers end in seconds") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net);
    model(scalar_input(rank), true, rank.rank() == 0).sum().backward();
  });
  INFO(summary(results));
  CHECK(results[1].error_type == "UsageError");
  CHECK_THAT(results[1].error,
             contains("b.weight") && contains("The other ranks did not fail alike, so this rank "
                                              "has left the group."));
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error, contains("rank 1 left") && contains("b.weight"));
  CHECK(results[0].seconds < 10);
}

TEST_CASE("a rank killed in the middle of backward: its peers end in seconds and name it") {
  const int victim = GENERATE(1, 0);
  const auto results = run_ranks(3, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    Two net;
    ddp::DistributedDataParallel model(net,
                                       ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    std::function<void()> die = [&] {
      if (rank.rank() == victim) {
        raise(SIGKILL);
      }
    };
    for (int step = 0; step < 3; ++step) {
      const auto x = scalar_input(rank);
      auto hidden = net->a(x);
      if (step == 2) {
        hidden = InBackward::apply(hidden, &die);
      }
      model(x, false, true);
      net->b(hidden).sum().backward();
    }
  });
  INFO(summary(results));
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) {
      CHECK(results[rank].status == 128 + SIGKILL);
      continue;
    }
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("rank " + std::to_string(victim)));
    CHECK(results[rank].seconds < 10);
  }
}

TEST_CASE("a rank killed between two steps: the error says what its peer waited for") {
  // The second step's forward agrees on the buckets, each one's sends the buffers.
  const int steps = GENERATE(1, 2);
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start(std::chrono::seconds(60));
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    ddp::DistributedDataParallel model(net);
    const auto x = at::sin(at::arange(8, at::kFloat).view({4, 2}) + rank.rank());
    for (int step = 0; step < 3; ++step) {
      if (step == steps && rank.rank() == 0) {
        raise(SIGKILL);
      }
      model(x).pow(3).sum().backward();
    }
  });
  INFO(summary(results));
  CHECK(results[0].status == 128 + SIGKILL);
  CHECK(results[1].error_type == "CommunicationError");
  CHECK_THAT(results[1].error,
             contains(steps == 1 ? "agreeing on the layout of the buckets failed"
                                 : "the broadcast of the module's buffers failed"));
  CHECK(results[1].seconds < 15);
}
