#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/process_group/backend_choice.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/shm/shm_error.h>

// Note [The choice of the backend]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A rank's announcement, "ddp/member/R" on the store, has one of these texts:
//   gloo           it wants Gloo: asked for, alone in its group, or shared memory is switched off
//   auto OFFER     it can share memory: process, descriptor and cookie of its mailbox
//   auto - REASON  it would, and cannot
//   shm OFFER, shm - REASON  the same of a rank that insists
// with "+nccl" behind the first word where the rank takes NCCL for its GPU's tensors.
// All ranks have said it when Gloo has connected them, and read the same texts. If these allow it,
// each rank opens the others' mailboxes, says on the store whether it could, and waits for all to
// say so: with one that could not, all take Gloo. A Python rank announces nothing, and nobody then
// waits for it: the group takes Gloo.

namespace ddp::detail {
namespace {

/// Behind the first word of an announcement.
constexpr const char* kNccl = "+nccl";

constexpr const char* kLazy =
    "TORCH_GLOO_LAZY_INIT is set, and nobody knows then when all ranks have come";

std::string machine_of(const shm::Offer& offer) {
  return offer.machine.substr(0, offer.machine.find('/'));
}

}  // namespace

BackendChoice::BackendChoice(const BackendNames& wish, int rank, std::vector<int> ranks)
    : wish_(wish.cpu), nccl_(wish.nccl), rank_(rank), ranks_(std::move(ranks)), own_("gloo") {
  const bool is_off = environment("DDP_SHM").value_or("1") == "0" || gloo_connects_lazily();
  if (wish_ == "gloo" || (wish_.empty() && (ranks_.size() == 1 || is_off))) {
    return;
  }
  own_ = wish_.empty() ? "auto " : "shm ";
  if (gloo_connects_lazily()) {
    own_ += fmt::format("- {}", kLazy);
    return;
  }
  try {
    arena_ = std::make_shared<shm::Arena>();
    own_ += shm::Offer::of_this_process(*arena_).text();
  } catch (const shm::ShmError& error) {
    arena_.reset();
    own_ += fmt::format("- {}", error.what());
  }
}

std::string BackendChoice::announcement() const {
  auto text = own_;
  if (nccl_) {
    text.insert(std::min(text.find(' '), text.size()), kNccl);
  }
  return text;
}

void BackendChoice::check_all_take_nccl(StoreChannel& channel) const {
  if (!channel.all_are_members()) {
    return;
  }
  const auto all = channel.announcements();
  std::vector<int> without;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].substr(0, all[rank].find(' ')).find(kNccl) == std::string::npos) {
      without.push_back(ranks_[rank]);
    }
  }
  if (!without.empty()) {
    throw UsageError(fmt::format(
        "rank {}: this rank takes NCCL, and rank{} {} {} not (no GPU is visible there, that ddp "
        "was "
        "built without NCCL, or the program asks for another backend): give the same backend on "
        "all ranks, init_process_group(\"nccl\") or (\"gloo\")",
        ranks_[rank_], without.size() > 1 ? "s" : "", fmt::join(without, ", "),
        without.size() > 1 ? "do" : "does"));
  }
}

std::string BackendChoice::rank_name(std::size_t rank) const {
  return fmt::format("rank {}", ranks_[rank]);
}

bool BackendChoice::refuse(const std::string& reason, bool is_surprise) {
  if (wish_ == "shm") {
    throw UsageError(
        fmt::format("rank {}: the backend \"shm\" cannot be used: {}. Leave the backend out "
                    "(\"\"), and Gloo is "
                    "taken where shared memory cannot be",
                    ranks_[rank_], reason));
  }
  if (is_surprise) {
    reason_ = reason;
  }
  return false;
}

std::optional<std::vector<shm::Offer>> BackendChoice::offers_of_all(
    const std::vector<std::string>& all) {
  std::vector<shm::Offer> offers;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto space = all[rank].find(' ');
    const auto rest = space == std::string::npos ? "" : all[rank].substr(space + 1);
    if (rest.empty()) {
      refuse(fmt::format("{} takes Gloo", rank_name(rank)), /*is_surprise=*/false);
      return std::nullopt;
    }
    const auto offer = shm::Offer::parse(rest);
    if (!offer) {
      refuse(fmt::format("{}: {}", rank_name(rank),
                         rest.substr(std::min<std::size_t>(2, rest.size()))),
             /*is_surprise=*/true);
      return std::nullopt;
    }
    offers.push_back(*offer);
  }
  for (std::size_t rank = 1; rank < offers.size(); ++rank) {
    if (machine_of(offers[rank]) != machine_of(offers[0])) {
      refuse(fmt::format("{} and {} are on different machines", rank_name(0), rank_name(rank)),
             /*is_surprise=*/false);
      return std::nullopt;
    }
  }
  for (std::size_t rank = 1; rank < offers.size(); ++rank) {
    if (offers[rank].machine != offers[0].machine) {
      refuse(fmt::format("{} and {} are in different containers, which do not see each other's "
                         "processes",
                         rank_name(0), rank_name(rank)),
             /*is_surprise=*/true);
      return std::nullopt;
    }
    if (offers[rank].user != offers[0].user) {
      refuse(fmt::format("{} and {} run as different users ({} and {})", rank_name(0),
                         rank_name(rank), offers[0].user, offers[rank].user),
             /*is_surprise=*/true);
      return std::nullopt;
    }
  }
  return offers;
}

std::unique_ptr<shm::Communicator> BackendChoice::decide(StoreChannel& channel) {
  if (own_ == "gloo") {
    return nullptr;
  }
  if (gloo_connects_lazily()) {
    refuse(fmt::format("{}: {}", rank_name(rank_), kLazy), /*is_surprise=*/false);
    return nullptr;
  }
  if (!channel.all_are_members()) {
    refuse("the group has ranks that are not of this library", /*is_surprise=*/false);
    return nullptr;
  }
  const auto offers = offers_of_all(channel.announcements());
  if (!offers) {
    return nullptr;
  }
  std::unique_ptr<shm::Communicator> ranks;
  std::string failure;
  try {
    ranks = std::make_unique<shm::Communicator>(std::move(arena_), rank_, *offers);
  } catch (const shm::ShmError& error) {
    failure = error.what();
  }
  const auto failures = channel.exchange("shm", failure, "opened the others' shared memory");
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) {
      refuse(fmt::format("{} cannot open the memory of {}", rank_name(rank), failures[rank]),
             /*is_surprise=*/true);
      return nullptr;
    }
  }
  return ranks;
}

}  // namespace ddp::detail
