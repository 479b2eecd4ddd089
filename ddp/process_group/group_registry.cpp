#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/group_registry.h>

namespace ddp::detail {
namespace {

/// Not null, since null means the default group: a non-member that went on with what new_group()
/// gave it would else talk to all ranks.
class NonMember final : public c10d::ProcessGroup {
 public:
  NonMember(std::vector<int> ranks, int rank)
      : ProcessGroup(/*rank=*/-1, /*size=*/-1), ranks_(std::move(ranks)), own_rank_(rank) {}

  [[noreturn]] void refuse() const {
    throw UsageError(fmt::format(
        "rank {} is not a member of this group, which has the ranks {}: only they may use it "
        "(ddp::is_member(group) tells)",
        own_rank_, fmt::join(ranks_, ", ")));
  }

 private:
  std::vector<int> ranks_;
  int own_rank_;
};

void refuse_non_member(const ProcessGroup& group) {
  if (const auto* non_member = dynamic_cast<const NonMember*>(group.get())) {
    non_member->refuse();
  }
}

}  // namespace

GroupRegistry& group_registry() {
  static auto* instance = new GroupRegistry;
  return *instance;
}

ProcessGroup resolve_group(const ProcessGroup& group) {
  if (group) {
    refuse_non_member(group);
    return group;
  }
  auto& all = group_registry();
  const std::lock_guard lock(all.mutex);
  if (!all.default_group) {
    throw UsageError(
        "there is no default process group: call ddp::init_process_group() first, on every rank");
  }
  return all.default_group;
}

std::shared_ptr<StoreChannel> channel_of(const ProcessGroup& group) {
  auto& all = group_registry();
  const std::lock_guard lock(all.mutex);
  if (const auto entry = all.groups.find(group.get()); entry != all.groups.end()) {
    return entry->second.channel;
  }
  refuse_non_member(group);
  const auto store = group->getStore();
  if (!store) {
    throw UsageError(
        "the process group has no store: construct c10d::ProcessGroup with the store that its "
        "ranks share");
  }
  Group entry;
  entry.process_group = group;
  entry.channel = std::make_shared<StoreChannel>(store, group->getRank(), group->getSize(),
                                                 store->getTimeout());
  entry.channel->assume_all_members();
  entry.channel->set_process_group(group);
  return all.groups.emplace(group.get(), std::move(entry)).first->second.channel;
}

std::string default_backend_name() {
  auto& all = group_registry();
  {
    const std::lock_guard lock(all.mutex);
    const auto entry = all.groups.find(all.default_group.get());
    if (entry != all.groups.end()) {
      return entry->second.backend;
    }
  }
  return resolve_backend_name("");
}

ProcessGroup make_non_member(std::vector<int> ranks, int rank) {
  return c10::make_intrusive<NonMember>(std::move(ranks), rank);
}

bool is_non_member(const ProcessGroup& group) {
  return dynamic_cast<const NonMember*>(group.get()) != nullptr;
}

}  // namespace ddp::detail
