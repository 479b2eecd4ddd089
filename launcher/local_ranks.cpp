#include <algorithm>
#include <climits>

#include <fmt/format.h>

#include <launcher/local_ranks.h>
#include <launcher/option_values.h>

namespace ddp::launcher {

StreamMask::StreamMask(std::string_view text, std::string_view source) {
  if (const auto value = parse_whole_number(text, kNone, kBoth)) {
    all_ = *value;
    return;
  }
  const auto refuse = [&] {
    usage_error(fmt::format(
        "{} must be 0 (none), 1 (standard output), 2 (standard error) or 3 (both), or such a "
        "number for local ranks, as 0:3,1:2; not '{}'",
        source, text));
  };
  const auto parts = split_at_commas(text);
  if (parts.empty()) refuse();
  for (const std::string_view part : parts) {
    const auto colon = part.find(':');
    if (colon == std::string_view::npos) refuse();
    const auto rank = parse_whole_number(part.substr(0, colon), 0, INT_MAX);
    const auto value = parse_whole_number(part.substr(colon + 1), kNone, kBoth);
    if (!rank || !value) refuse();
    each_[*rank] = *value;
  }
}

int StreamMask::of(int local_rank) const {
  const auto found = each_.find(local_rank);
  return found != each_.end() ? found->second : all_;
}

bool StreamMask::any() const {
  return all_ != kNone || std::any_of(each_.begin(), each_.end(),
                                      [](const auto& each) { return each.second != kNone; });
}

std::set<int> parse_local_ranks(std::string_view text, std::string_view source) {
  std::set<int> ranks;
  for (const std::string_view part : split_at_commas(text)) {
    const auto rank = parse_whole_number(part, 0, INT_MAX);
    if (!rank) {
      usage_error(fmt::format("{} must be local ranks with commas between them, as 0,1; not '{}'",
                              source, text));
    }
    ranks.insert(*rank);
  }
  return ranks;
}

}  // namespace ddp::launcher
