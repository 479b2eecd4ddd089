#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/join.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/reducer/watched_wait.h>

namespace ddp::detail {
namespace {

bool is_active(std::int32_t word) {
  return word != static_cast<std::int32_t>(JoinWord::kJoined) &&
         word != static_cast<std::int32_t>(JoinWord::kExhausted);
}

const char* text_of(std::int32_t word) {
  switch (static_cast<JoinWord>(word)) {
    case JoinWord::kJoined:
    case JoinWord::kExhausted:
      return "has no input left";
    case JoinWord::kForward:
    case JoinWord::kBuffers:
      return "is in a forward";
    case JoinWord::kBackward:
      return "is in a backward";
  }
  return "said something unknown";
}

}  // namespace

JoinSession::JoinSession(ProcessGroup group, std::shared_ptr<StoreChannel> channel,
                         JoinOptions options, c10::Device device)
    : group_(std::move(group)),
      channel_(std::move(channel)),
      options_(options),
      device_(device),
      last_active_(group_->getSize() - 1) {}

std::vector<std::int32_t> JoinSession::exchange(JoinWord word) {
  auto words = at::zeros({group_->getSize()}, at::kInt);
  words[group_->getRank()] = static_cast<std::int32_t>(word);
  std::vector<at::Tensor> tensors{words.to(device_)};
  try {
    if (!watched_wait(*group_->allreduce(tensors), channel_.get(), wait_kind(*group_, device_))) {
      throw std::runtime_error("it was aborted");
    }
  } catch (const std::exception& error) {
    fail_collective(*channel_, "the announcement of join()", concise(error));
  }
  const auto host = tensors.front().cpu();
  return {host.data_ptr<std::int32_t>(), host.data_ptr<std::int32_t>() + host.numel()};
}

void JoinSession::check(const std::vector<std::int32_t>& words) {
  std::vector<int> exhausted;
  int first_active = -1;
  int other = -1;
  for (int rank = 0; rank < static_cast<int>(words.size()); ++rank) {
    if (words[rank] == static_cast<std::int32_t>(JoinWord::kExhausted)) {
      exhausted.push_back(rank);
    }
    if (!is_active(words[rank])) {
      continue;
    }
    if (first_active < 0) {
      first_active = rank;
      last_active_ = rank;
    } else if (words[rank] != words[first_active]) {
      other = rank;
    }
    last_active_ = rank;
  }
  const auto who = fmt::format("rank {} of {}: join: ", group_->getRank(), group_->getSize());
  if (first_active >= 0 && !exhausted.empty()) {
    ended_everywhere_ = true;
    throw UsageError(fmt::format(
        "{}rank{} {} ran out of inputs before the others, and throw_on_early_termination is set: "
        "training ends on every rank. Without it, such a rank contributes zeros until the others "
        "have finished.",
        who, exhausted.size() == 1 ? "" : "s", fmt::join(exhausted, ", ")));
  }
  if (other >= 0) {
    ended_everywhere_ = true;
    throw UsageError(fmt::format(
        "{}rank {} {}, rank {} {}: between two steps every rank that has input must call forward "
        "and backward of the wrapped model equally often",
        who, first_active, text_of(words[first_active]), other, text_of(words[other])));
  }
}

int JoinSession::announce(JoinWord word) {
  const auto words = exchange(word);
  check(words);
  int active = 0;
  for (const auto said : words) {
    active += is_active(said) ? 1 : 0;
  }
  return active;
}

std::optional<JoinWord> JoinSession::listen() {
  const auto words =
      exchange(options_.throw_on_early_termination() ? JoinWord::kExhausted : JoinWord::kJoined);
  check(words);
  for (const auto word : words) {
    if (is_active(word)) {
      return static_cast<JoinWord>(word);
    }
  }
  return std::nullopt;
}

}  // namespace ddp::detail
