#include <algorithm>
#include <numeric>

#include <c10/util/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/process_group/make_group.h>
#include <ddp/process_group/process_group.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp {
namespace {

using std::chrono::milliseconds;

std::vector<int> checked(std::vector<int> ranks, int rank, int world_size) {
  if (ranks.empty()) {
    ranks.resize(world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::sort(ranks.begin(), ranks.end());
  if (ranks.front() < 0 || ranks.back() >= world_size) {
    throw UsageError(
        fmt::format("rank {}: new_group: the ranks are {}; the default group has the ranks 0 to {}",
                    rank, fmt::join(ranks, ", "), world_size - 1));
  }
  if (const auto twice = std::adjacent_find(ranks.begin(), ranks.end()); twice != ranks.end()) {
    throw UsageError(fmt::format("rank {}: new_group: rank {} is listed twice", rank, *twice));
  }
  return ranks;
}

/// In a job with Python ranks, Python's: a counter that all ranks advance together. Among C++ ranks
/// alone, one made of the ranks and of how many groups they had before, so that only members need
/// to agree.
std::string name_of(const std::vector<int>& ranks, const detail::StoreChannel& parent,
                    detail::GroupRegistry& all) {
  const auto number = all.group_count++;
  const auto same = all.groups_of_ranks[ranks]++;
  if (!parent.all_are_members()) {
    return std::to_string(number);
  }
  return fmt::format("ranks-{}-{}", c10::sha1(fmt::format("{}", fmt::join(ranks, "_"))).str(),
                     same);
}

detail::Group group_entry(const ProcessGroup& group) {
  auto& all = detail::group_registry();
  const std::lock_guard lock(all.mutex);
  const auto entry = all.groups.find(group.get());
  if (entry == all.groups.end()) {
    throw UsageError(
        "this process group was destroyed, or made by the program itself: its ranks are not known");
  }
  return entry->second;
}

}  // namespace

ProcessGroup new_group(std::vector<int> list, const NewGroupOptions& options) {
  if (options.timeout() < milliseconds::zero()) {
    throw UsageError(fmt::format(
        "new_group: timeout is {} ms; it must be positive, or 0 for the default group's",
        options.timeout().count()));
  }
  if (!detail::parse_backend_names(options.backend())) {
    throw UsageError(
        fmt::format("new_group: the backend \"{}\" is unknown; use \"gloo\", \"shm\", \"nccl\", "
                    "\"cpu:gloo,cuda:nccl\", or \"\" for what the default group asked for",
                    options.backend()));
  }
  const auto parent = group_entry(default_group());
  const int rank = parent.process_group->getRank();
  const auto ranks = checked(std::move(list), rank, parent.process_group->getSize());
  auto& all = detail::group_registry();
  std::string name;
  {
    const std::lock_guard lock(all.mutex);
    name = name_of(ranks, *parent.channel, all);
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  if (own == ranks.end()) {
    return detail::make_non_member(ranks, rank);
  }
  const auto timeout =
      options.timeout() > milliseconds::zero() ? options.timeout() : parent.channel->timeout();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  auto store = parent.process_group->getStore();
  const auto port = detail::tcp_port_of(store);
  const detail::StoreDeadline store_deadline(port, deadline + milliseconds(500));
  detail::GroupPlan plan;
  plan.store = port ? store->clone() : store;
  plan.name = name;
  plan.description = "undefined";
  plan.rank = static_cast<int>(own - ranks.begin());
  plan.ranks = ranks;
  plan.backend = options.backend().empty() ? parent.backend : options.backend();
  plan.devices = detail::make_gloo_devices(rank, parent.address);
  plan.address = parent.address;
  plan.timeout = timeout;
  plan.deadline = deadline;
  plan.where = fmt::format("new_group({{{}}})", fmt::join(ranks, ", "));
  auto group = detail::make_group(plan);
  group.channel->set_serves_store(parent.leaves_last);
  const auto result = group.process_group;
  const std::lock_guard lock(all.mutex);
  all.groups.emplace(result.get(), std::move(group));
  return result;
}

bool is_member(const ProcessGroup& group) { return !detail::is_non_member(group); }

std::vector<int> get_process_group_ranks(const ProcessGroup& group) {
  return group_entry(detail::resolve_group(group)).ranks;
}

int get_group_rank(const ProcessGroup& group, int global_rank) {
  const auto ranks = get_process_group_ranks(group);
  const auto entry = std::find(ranks.begin(), ranks.end(), global_rank);
  if (entry == ranks.end()) {
    throw UsageError(
        fmt::format("get_group_rank: rank {} is not in the group, which has the ranks {}",
                    global_rank, fmt::join(ranks, ", ")));
  }
  return static_cast<int>(entry - ranks.begin());
}

int get_global_rank(const ProcessGroup& group, int group_rank) {
  const auto ranks = get_process_group_ranks(group);
  if (group_rank < 0 || group_rank >= static_cast<int>(ranks.size())) {
    throw UsageError(
        fmt::format("get_global_rank: {} is not a rank of the group, which has the ranks 0 to {}",
                    group_rank, ranks.size() - 1));
  }
  return ranks[group_rank];
}

}  // namespace ddp
