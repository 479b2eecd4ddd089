#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <regex>
#include <sys/wait.h>
#include <test/process/models.h>
#include <test/support/catch2.h>
#include <thread>
#include <unistd.h>

// A fault on one rank of a training job, by (rank, step, place): what its peers see, and how soon.
// Long form: scripts/fault_storm.sh.

using ddp::test::bits_of_all;
using ddp::test::InBackward;
using ddp::test::Rank;
using ddp::test::RankResult;
using ddp::test::run_ranks;
using ddp::test::start;
using ddp::test::summary;
using ddp::test::Trigger;
using ddp::test::within;

namespace {

constexpr int kRanks = 3;
constexpr int kSteps = 4;
/// Of the group, for faults whose end the peers see without it.
constexpr std::chrono::seconds kLongTimeout(60);
/// Of the group, for faults that only a timeout reveals.
constexpr std::chrono::seconds kShortTimeout(3);
/// For how long a briefly stopped rank sleeps.
constexpr std::chrono::milliseconds kShortStop(200);

enum class Place {
  kInit,
  kConstruct,
  kForward,
  kBackward,
  kTensorHook,
  kCommHook,
  kCollective,
  kDestroy
};
constexpr std::array kPlaces{Place::kInit,       Place::kConstruct,  Place::kForward,
                             Place::kBackward,   Place::kTensorHook, Place::kCommHook,
                             Place::kCollective, Place::kDestroy};
enum class Action {
  kExit,       // the process ends without a word
  kKill,       // SIGKILL
  kStopShort,  // SIGSTOP, and SIGCONT within the group's timeout
  kStopLong,   // SIGSTOP, and SIGCONT once a peer has failed
  kThrow,      // an exception that ends the program
  kThrowStay,  // an exception that the program catches; then it does nothing
};
constexpr std::array kActions{Action::kExit,     Action::kKill,  Action::kStopShort,
                              Action::kStopLong, Action::kThrow, Action::kThrowStay};

constexpr std::array kPlaceNames{"init",        "construct", "forward",    "backward",
                                 "tensor hook", "comm hook", "collective", "destroy"};
constexpr std::array kActionNames{"exit",      "kill",  "short stop",
                                  "long stop", "throw", "throw and stay"};

struct Fault {
  int rank = 0;
  int step = 0;
  Place place = Place::kForward;
  Action action = Action::kExit;

  bool in_a_pass() const {
    return place == Place::kBackward || place == Place::kTensorHook || place == Place::kCommHook;
  }
  bool in_a_step() const {
    return in_a_pass() || place == Place::kForward || place == Place::kCollective;
  }
  bool throws() const { return action == Action::kThrow || action == Action::kThrowStay; }
  /// Whether the peers wait for the fault's rank alone, with nothing that ends when it does.
  bool needs_timeout() const {
    return action == Action::kStopLong || !in_a_step() ||
           (action == Action::kThrowStay && !in_a_pass());
  }
  std::string text() const {
    return std::string(kActionNames[static_cast<int>(action)]) + " on rank " +
           std::to_string(rank) + " in step " + std::to_string(step) + ", in " +
           kPlaceNames[static_cast<int>(place)];
  }
};

/// Four layers with a buffer; the fault's places inside forward and backward.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear in = register_module("in", torch::nn::Linear(4, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(8, 1));
  std::function<void()> in_forward;
  std::function<void()> in_backward;

  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = at::relu(norm(in(x)));
    in_forward();
    return out(InBackward::apply(at::relu(middle(hidden)), &in_backward));
  }
};
TORCH_MODULE(Net);

class Injector {
 public:
  Injector(const Rank& rank, std::optional<Fault> fault) : rank_(rank), fault_(fault) {}

  bool is_at(Place place, int step) const {
    return fault_ && fault_->rank == rank_.rank() && fault_->place == place && fault_->step == step;
  }

  void at(Place place, int step = 0) {
    if (done_ || !is_at(place, step)) {
      return;
    }
    done_ = true;
    rank_.report("fault", fault_->text());
    switch (fault_->action) {
      case Action::kExit:
        _exit(7);
      case Action::kKill:
        raise(SIGKILL);
        break;
      case Action::kStopShort:
      case Action::kStopLong:
        raise(SIGSTOP);
        break;
      case Action::kThrow:
      case Action::kThrowStay:
        throw std::domain_error("a fault of this rank's own");
    }
  }

 private:
  const Rank& rank_;
  const std::optional<Fault> fault_;
  bool done_ = false;
};

/// Waits for the test's SIGUSR1, which `job` blocks.
void wait_for_signal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  const timespec limit{45, 0};
  RANK_CHECK(sigtimedwait(&signals, nullptr, &limit) == SIGUSR1);
}

void try_next_step(const Rank& rank, ddp::DistributedDataParallel<Net>& model) {
  try {
    model(at::ones({2, 4}));
    rank.report("next", std::string("(accepted)"));
  } catch (const ddp::CommunicationError& error) {
    rank.report("next", std::string(error.what()));
  }
}

/// The job of one rank. A CommunicationError is reported as "failed", and the rank then shows what
/// a next step does and that the group can be destroyed.
void job(const Rank& rank, std::optional<Fault> fault) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before other threads inherit the mask
  Injector inject(rank, fault);
  inject.at(Place::kInit);
  start(fault && fault->needs_timeout() ? kShortTimeout : kLongTimeout);
  std::optional<ddp::DistributedDataParallel<Net>> model;
  try {
    ddp::barrier();  // so that nobody is still connecting
    inject.at(Place::kConstruct);
    torch::manual_seed(1);
    Net net;
    model.emplace(net, ddp::DistributedDataParallelOptions().bucket_cap_mb(1e-6));
    int step = 0;
    net->in_forward = [&] { inject.at(Place::kForward, step); };
    net->in_backward = [&] { inject.at(Place::kBackward, step); };
    net->middle->weight.register_hook([&](const at::Tensor& gradient) {
      inject.at(Place::kTensorHook, step);
      return gradient;
    });
    if (fault && fault->place == Place::kCommHook) {
      (*model)->register_comm_hook([&](c10d::GradBucket& bucket) {
        if (bucket.getIndex() == 0) {
          inject.at(Place::kCommHook, step);
        }
        std::vector<at::Tensor> tensors{bucket.getBufferRef().mul_(1.0 / kRanks)};
        return ddp::default_group()->allreduce(tensors)->getFuture();
      });
    }
    torch::optim::SGD optimizer((*model)->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    for (; step < kSteps; ++step) {
      optimizer.zero_grad(step % 2 == 0);
      const auto x =
          at::sin(at::arange(8, at::kFloat).view({2, 4}) + (step * kRanks + rank.rank()));
      const auto loss = (*model)(x).pow(2).mean();
      loss.backward();
      const auto total = loss.detach().clone();
      if (fault && fault->throws() && inject.is_at(Place::kCollective, step)) {
        rank.report("fault", fault->text());
        ddp::all_reduce(at::Tensor());
      }
      auto work = ddp::all_reduce(total, ddp::AllReduceOptions().async_op(true));
      inject.at(Place::kCollective, step);
      work.wait();
      optimizer.step();
    }
    ddp::barrier();  // else all of the last collective may be sent when its fault comes
    rank.report("weights", bits_of_all((*model)->parameters()));
    inject.at(Place::kDestroy);
  } catch (const ddp::CommunicationError& error) {
    rank.report("failed", std::string(error.what()));
    if (model && fault->in_a_step()) {
      try_next_step(rank, *model);
    }
  } catch (const std::exception& error) {
    // The fault's own exception.
    rank.report("caught", std::string(error.what()));
    if (fault->action != Action::kThrowStay) {
      throw;
    }
    if (fault->in_a_pass()) {
      try_next_step(rank, *model);
    }
    wait_for_signal();
  }
  ddp::destroy_process_group();
  rank.report("destroyed", 1);
}

/// Waits until a child has stopped (or ended).
void wait_until_stopped(int pid) {
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED | WEXITED | WNOWAIT);
}

/// Wakes the fault's rank when `count` peers have failed.
class Waker {
 public:
  Waker(const Fault& fault, int signal, int count)
      : fault_(fault), signal_(signal), count_(count) {}

  std::vector<Trigger> triggers() {
    std::vector<Trigger> all{{fault_.rank, "fault", [this](int pid) { pid_ = pid; }}};
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank != fault_.rank) {
        all.push_back({rank, "failed", [this](int) {
                         if (--count_ == 0) {
                           kill(pid_, signal_);
                         }
                       }});
      }
    }
    return all;
  }

 private:
  const Fault fault_;
  const int signal_;
  int count_;
  int pid_ = 0;
};

std::vector<RankResult> run(const Fault& fault) {
  const auto body = [&](const Rank& rank) { job(rank, fault); };
  if (fault.action == Action::kStopShort) {
    return run_ranks(kRanks, body, within(100), {{fault.rank, "fault", [](int pid) {
                                                    wait_until_stopped(pid);
                                                    std::this_thread::sleep_for(kShortStop);
                                                    kill(pid, SIGCONT);
                                                  }}});
  }
  Waker waker = fault.action == Action::kStopLong ? Waker(fault, SIGCONT, 1)
                                                  : Waker(fault, SIGUSR1, kRanks - 1);
  return run_ranks(kRanks, body, within(100), waker.triggers());
}

std::string weights_of(bool with_comm_hook) {
  // A rank that is not there never comes to its place: a comm hook without a fault.
  std::optional<Fault> fault;
  if (with_comm_hook) {
    fault = Fault{-1, 0, Place::kCommHook, Action::kStopShort};
  }
  const auto results = run_ranks(kRanks, [&](const Rank& rank) { job(rank, fault); });
  INFO(summary(results));
  for (const auto& result : results) {
    REQUIRE(result.status == 0);
    REQUIRE(result["weights"] == results[0]["weights"]);
  }
  return results[0]["weights"];
}

/// The longest that a peer waited for the end of a rank that the group's timeout did not end.
double longest_wait = 0;

void check_briefly_stopped(const std::vector<RankResult>& results, const Fault& fault) {
  static const std::array<std::string, 2> expected{weights_of(false), weights_of(true)};
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["weights"] == expected[fault.place == Place::kCommHook ? 1 : 0]);
  }
}

void check_victim(const RankResult& victim, const Fault& fault) {
  if (fault.throws() && fault.place == Place::kCommHook) {
    // The reducer takes it up: the rank has then left the group in good order.
    CHECK(victim.status == 0);
    CHECK_THAT(victim["failed"], contains("the communication hook for bucket 0") &&
                                     contains("a fault of this rank's own"));
    CHECK_THAT(victim["next"], contains("destroy it with ddp::destroy_process_group()"));
    CHECK(victim["destroyed"] == "1");
    return;
  }
  switch (fault.action) {
    case Action::kExit:
      CHECK(victim.status == 7);
      break;
    case Action::kKill:
      CHECK(victim.status == 128 + SIGKILL);
      break;
    case Action::kStopLong:
      // It goes on where the others have given up.
      CHECK_THAT(victim["failed"], contains("rank " + std::to_string(fault.rank) + " of 3"));
      CHECK(victim["destroyed"] == "1");
      break;
    case Action::kThrow:
      CHECK(victim.status == 1);
      CHECK(victim["caught"] == victim.error);
      break;
    case Action::kThrowStay:
      CHECK(victim.status == 0);
      CHECK(victim["destroyed"] == "1");
      if (fault.in_a_pass()) {
        CHECK_THAT(victim["next"], contains("left the process group"));
      }
      break;
    case Action::kStopShort:
      break;
  }
}

/// "rank 2" or, where several are missing, "ranks 0, 2".
bool names(const std::string& text, int rank) {
  return std::regex_search(text, std::regex("ranks? ([0-9]+, )*" + std::to_string(rank) + "\\b"));
}

void check_peer(const RankResult& peer, const RankResult& victim, const Fault& fault) {
  if (fault.place == Place::kDestroy) {
    CHECK(peer.status == 0);
    CHECK(peer["weights"] == victim["weights"]);
    return;
  }
  if (fault.place == Place::kInit) {
    CHECK(peer.error_type == "CommunicationError");
    CHECK(names(peer.error, fault.rank));
    return;
  }
  CHECK(peer.status == 0);
  CHECK(names(peer["failed"], fault.rank));
  CHECK(peer["destroyed"] == "1");
  if (fault.in_a_step()) {
    CHECK_THAT(peer["next"], contains("destroy it with ddp::destroy_process_group()"));
  }
  if (!fault.needs_timeout()) {
    const auto wait = peer.arrived.at("failed") - victim.arrived.at("fault");
    CHECK(wait < std::chrono::seconds(kLongTimeout).count() / 2);
    longest_wait = std::max(longest_wait, wait);
  }
}

void check(const Fault& fault) {
  const auto results = run(fault);
  INFO(fault.text() << summary(results));
  const auto& victim = results[fault.rank];
  CHECK(victim["fault"] == fault.text());
  if (fault.action == Action::kStopShort) {
    check_briefly_stopped(results, fault);
    return;
  }
  check_victim(victim, fault);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != fault.rank) {
      INFO("peer " << rank);
      check_peer(results[rank], victim, fault);
    }
  }
}

/// Whether this action can be tried at this place.
bool is_possible(Place place, Action action) {
  if (place == Place::kInit || place == Place::kConstruct || place == Place::kDestroy) {
    return action == Action::kExit || action == Action::kKill;
  }
  return true;
}

}  // namespace

TEST_CASE("faults: a rank that exits or is killed in a step ends its peers, which name it") {
  int rank = 0;
  for (const auto place : {Place::kForward, Place::kBackward, Place::kTensorHook, Place::kCommHook,
                           Place::kCollective}) {
    check({rank++ % kRanks, 2, place, Action::kKill});
    check({rank % kRanks, 0, place, Action::kExit});
  }
}

TEST_CASE("faults: an exception in a pass ends the peers, whether its rank stays or goes") {
  int rank = 0;
  for (const auto place : {Place::kBackward, Place::kTensorHook, Place::kCommHook}) {
    check({rank % kRanks, 2, place, Action::kThrowStay});
    check({++rank % kRanks, 1, place, Action::kThrow});
  }
}

TEST_CASE("faults: an exception outside of a pass") {
  // A program that ends takes its peers along; of one that stays they hear after the timeout.
  check({1, 2, Place::kForward, Action::kThrow});
  check({0, 2, Place::kForward, Action::kThrowStay});
  check({0, 2, Place::kCollective, Action::kThrow});
  check({2, 2, Place::kCollective, Action::kThrowStay});
}

TEST_CASE("faults: a rank that sleeps for a moment loses nothing") {
  int rank = 0;
  for (const auto place : {Place::kForward, Place::kBackward, Place::kTensorHook, Place::kCommHook,
                           Place::kCollective}) {
    check({rank++ % kRanks, 2, place, Action::kStopShort});
  }
}

TEST_CASE(
    "faults: a rank that sleeps for longer than the timeout is named, and fails when it wakes") {
  check({0, 2, Place::kBackward, Action::kStopLong});
  check({1, 1, Place::kForward, Action::kStopLong});
  check({2, 3, Place::kCollective, Action::kStopLong});
}

TEST_CASE("faults: a rank that dies before the first step or after the last") {
  check({1, 0, Place::kInit, Action::kExit});
  check({1, 0, Place::kConstruct, Action::kKill});
  check({0, 0, Place::kDestroy, Action::kKill});
  check({2, 0, Place::kDestroy, Action::kExit});
}

TEST_CASE("faults: at random") {
  const auto number = [](const char* name, unsigned otherwise) {
    const auto* text = std::getenv(name);
    return text != nullptr ? static_cast<unsigned>(std::stoul(text)) : otherwise;
  };
  const auto rounds = number("DDP_FAULT_ROUNDS", 5);
  const auto seed = number("DDP_FAULT_SEED", 1);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) { return random() % limit; };
  for (unsigned round = 0; round < rounds;) {
    const Fault fault{static_cast<int>(below(kRanks)), static_cast<int>(below(kSteps)),
                      kPlaces[below(kPlaces.size())], kActions[below(kActions.size())]};
    if (!is_possible(fault.place, fault.action)) {
      continue;
    }
    const Fault placed =
        fault.in_a_step() ? fault : Fault{fault.rank, 0, fault.place, fault.action};
    INFO("round " << round << " of seed " << seed);
    check(placed);
    std::printf("fault %u: %s\n", ++round, placed.text().c_str());
  }
  std::printf(
      "%u random faults of seed %u; the longest wait of a peer for a rank that ended or threw "
      "in a pass, over all tests: %.1f s\n",
      rounds, seed, longest_wait);
}

// DDP_FAULT="rank step place action", the last two as their numbers above: one fault by hand.
TEST_CASE("faults: one", "[.]") {
  Fault fault;
  int place = 0;
  int action = 0;
  REQUIRE(std::sscanf(std::getenv("DDP_FAULT"), "%d %d %d %d", &fault.rank, &fault.step, &place,
                      &action) == 4);
  fault.place = kPlaces.at(static_cast<std::size_t>(place));
  fault.action = kActions.at(static_cast<std::size_t>(action));
  check(fault);
}
