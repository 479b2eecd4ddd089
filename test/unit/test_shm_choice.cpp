#include <test/support/catch2.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/error.h>
#include <ddp/process_group/backend_choice.h>
#include <ddp/process_group/shm/offer.h>

// What a rank decides from what the other one has said on the store. The other one is this test.

using ddp::detail::BackendChoice;
using ddp::detail::StoreChannel;
using ddp::shm::Arena;
using ddp::shm::Offer;

namespace {

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

struct Outcome {
  bool is_shared = false;
  std::string reason;
  std::string error;
};

/// Of rank 0, where rank 1 has announced `other` ("" for a rank of another library), and has said
/// `opened` when it was to open rank 0's memory ("" for nothing).
Outcome decide(const std::string& wish, const std::string& other, const std::string& opened) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  StoreChannel channel(store, 0, 2, std::chrono::milliseconds(200));
  BackendChoice choice({wish, false}, 0, {3, 5});
  channel.announce(choice.announcement());
  if (!other.empty()) {
    store->set("ddp/member/1", bytes(other));
  }
  if (!opened.empty()) {
    store->set("ddp/exchange/shm/1", bytes(opened));
  }
  channel.find_members();
  Outcome outcome;
  try {
    outcome.is_shared = choice.decide(channel) != nullptr;
  } catch (const ddp::Error& error) {
    outcome.error = error.what();
  }
  outcome.reason = choice.reason();
  return outcome;
}

}  // namespace

TEST_CASE("ranks that cannot share memory are told apart") {
  const Arena arena;
  const auto own = Offer::of_this_process(arena);
  CHECK(decide("", "auto " + own.text(), "=").is_shared);
  CHECK(decide("shm", "auto " + own.text(), "=").is_shared);
  const auto refused = [](const std::string& other, const std::string& opened = "") {
    const auto insisting = decide("shm", other, opened);
    CHECK_THAT(insisting.error, contains("rank 3: the backend \"shm\" cannot be used: ") &&
                                    contains("Leave the backend out (\"\")"));
    const auto flexible = decide("", other, opened);
    CHECK(!flexible.is_shared);
    CHECK(flexible.error.empty());
    CHECK((flexible.reason.empty() || insisting.error.find(flexible.reason) != std::string::npos));
    return std::pair(insisting.error, !flexible.reason.empty());
  };
  const auto said = [](const std::string& text) {
    return Catch::Matchers::Predicate<std::pair<std::string, bool>>(
        [text](const auto& found) {
          return found.second && found.first.find(text) != std::string::npos;
        },
        "says: " + text);
  };
  const auto silent = [](const std::string& text) {
    return Catch::Matchers::Predicate<std::pair<std::string, bool>>(
        [text](const auto& found) {
          return !found.second && found.first.find(text) != std::string::npos;
        },
        "throws, and says nothing: " + text);
  };
  CHECK_THAT(refused(""), silent("the group has ranks that are not of this library"));
  CHECK_THAT(refused("gloo"), silent("rank 5 takes Gloo"));
  CHECK_THAT(refused("auto - there is no room"), said("rank 5: there is no room"));
  auto offer = own;
  offer.machine = "another/1";
  CHECK_THAT(refused("auto " + offer.text()),
             silent("rank 3 and rank 5 are on different machines"));
  offer.machine = own.machine + "0";
  CHECK_THAT(refused("auto " + offer.text()),
             said("rank 3 and rank 5 are in different containers, which do not see each other's"));
  offer.machine = own.machine;
  offer.user = own.user + 1;
  CHECK_THAT(refused("auto " + offer.text()),
             said("rank 3 and rank 5 run as different users (" + std::to_string(own.user)));
  offer.user = own.user;
  ++offer.cookie;
  CHECK_THAT(refused("auto " + offer.text(), "="),
             said("rank 3 cannot open the memory of the group's rank 1: "));
  CHECK_THAT(refused("auto " + own.text(), "=rank 0: it is not there"),
             said("rank 5 cannot open the memory of rank 0: it is not there"));
}

TEST_CASE("a rank that does not answer any more is named") {
  const Arena arena;
  const auto outcome = decide("", "auto " + Offer::of_this_process(arena).text(), "");
  CHECK_THAT(outcome.error,
             contains("rank 0: rank 1 has not opened the others' shared memory within 0.2 s"));
}
