#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

namespace ddp::launcher {

/// Standard output, standard error, both, or none, for each local rank: the value of --redirects
/// and --tee.
class StreamMask {
 public:
  enum : int { kNone = 0, kOutput = 1, kErrors = 2, kBoth = 3 };

  StreamMask() = default;

  /// "3", or "0:3,1:2" (the ranks that are not named have none). Throws Error that begins with
  /// `source`.
  StreamMask(std::string_view text, std::string_view source);

  int of(int local_rank) const;
  bool any() const;

  /// The highest local rank that it names, -1 where it names none.
  int highest_rank() const { return each_.empty() ? -1 : each_.rbegin()->first; }

 private:
  int all_ = kNone;
  std::map<int, int> each_;
};

/// "0,1,5" as a set. Throws Error that begins with `source`.
std::set<int> parse_local_ranks(std::string_view text, std::string_view source);

}  // namespace ddp::launcher
