#include <sstream>

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/model_agreement.h>

namespace ddp::detail {
namespace {

std::string line(const char* kind, const NamedParameter& entry) {
  return fmt::format(
      "{}{} {}: shape [{}], strides [{}], {}",
      kind == std::string("parameter") && !entry.tensor.requires_grad() ? "frozen " : "", kind,
      entry.name, fmt::join(entry.tensor.sizes(), ", "), fmt::join(entry.tensor.strides(), ", "),
      c10::toString(entry.tensor.scalar_type()));
}

/// FNV-1a, 64 bits: enough to notice a difference, which the full text then decides.
std::string digest(const std::string& text) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) {
    hash = (hash ^ byte) * 1099511628211ULL;
  }
  return fmt::format("{:016x}", hash);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string next; std::getline(stream, next);) {
    lines.push_back(next);
  }
  return lines;
}

std::string compare(int first_rank, const std::string& first, int other_rank,
                    const std::string& other) {
  const auto left = lines_of(first);
  const auto right = lines_of(other);
  std::string text;
  if (left.front() != right.front()) {
    text = fmt::format("rank {} has {}, rank {} has {}. ", first_rank, left.front(), other_rank,
                       right.front());
  }
  for (std::size_t i = 1; i < std::max(left.size(), right.size()); ++i) {
    const auto& mine = i < left.size() ? left[i] : std::string("nothing");
    const auto& theirs = i < right.size() ? right[i] : std::string("nothing");
    if (mine != theirs) {
      return text + fmt::format("The first difference: rank {} has {}; rank {} has {}.", first_rank,
                                mine, other_rank, theirs);
    }
  }
  return text;
}

}  // namespace

void check_models_agree(StoreChannel& channel, const std::string& scope, const std::string& options,
                        const std::vector<NamedParameter>& parameters,
                        const std::vector<NamedParameter>& buffers) {
  // A shared prefix of the description is never sent where all agree: digests first.
  std::string text = fmt::format("{} parameter{} and {} buffer{}\n", parameters.size(),
                                 parameters.size() == 1 ? "" : "s", buffers.size(),
                                 buffers.size() == 1 ? "" : "s");
  text += "options " + options + "\n";
  for (const auto& parameter : parameters) {
    text += line("parameter", parameter) + "\n";
  }
  for (const auto& buffer : buffers) {
    text += line("buffer", buffer) + "\n";
  }
  const auto what = std::string("wrapped its model in DistributedDataParallel");
  const auto agree = channel.decide(
      scope + "/digest", digest(text),
      [](const std::vector<std::string>& digests) -> std::string {
        for (const auto& other : digests) {
          if (other != digests.front()) {
            return "differ";
          }
        }
        return "agree";
      },
      what);
  if (agree == "agree") {
    return;
  }
  const auto& members = channel.members();
  const auto verdict = channel.decide(
      scope + "/description", text,
      [&](const std::vector<std::string>& texts) {
        for (std::size_t i = 1; i < texts.size(); ++i) {
          if (texts[i] != texts.front()) {
            return compare(members.front(), texts.front(), members[i], texts[i]);
          }
        }
        return std::string("their descriptions have the same digest by accident");
      },
      what);
  throw UsageError(
      fmt::format("rank {} of {}: DistributedDataParallel: the ranks' models or options differ. {} "
                  "Build the same model on every rank, and wrap it with the same options.",
                  channel.rank(), channel.world_size(), verdict));
}

}  // namespace ddp::detail
