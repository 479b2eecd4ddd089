#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include <ddp/process_group/shm/available_memory.h>

namespace ddp::shm {
namespace {

/// The number behind `name` in a file of lines "name number"; the first one of all for "".
std::optional<std::uint64_t> number_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string word; name.empty() || file >> word;) {
    if (name.empty() || word == name) {
      std::uint64_t number = 0;
      return file >> number ? std::optional(number) : std::nullopt;
    }
  }
  return std::nullopt;
}

/// What a control group has left; nothing where it has no limit ("max", which is no number).
std::optional<std::uint64_t> left_in(const std::string& folder, const std::string& limit_name,
                                     const std::string& usage_name, const std::string& prefix) {
  const auto limit = number_in(folder + limit_name, "");
  const auto usage = number_in(folder + usage_name, "");
  if (!limit || !usage) {
    return std::nullopt;
  }
  // Cached files count as used, and go when memory is needed.
  const auto stat = folder + "memory.stat";
  const auto cached = number_in(stat, prefix + "inactive_file").value_or(0) +
                      number_in(stat, prefix + "active_file").value_or(0);
  const auto in_use = *usage - std::min(*usage, cached);
  return *limit - std::min(*limit, in_use);
}

}  // namespace

std::uint64_t available_memory() {
  auto available = number_in("/proc/meminfo", "MemAvailable:").value_or(0) * 1024;
  // Both versions of control groups, as a container sees its own.
  for (const auto& left : {left_in("/sys/fs/cgroup/", "memory.max", "memory.current", ""),
                           left_in("/sys/fs/cgroup/memory/", "memory.limit_in_bytes",
                                   "memory.usage_in_bytes", "total_")}) {
    available = left ? std::min(available, *left) : available;
  }
  return available;
}

}  // namespace ddp::shm
