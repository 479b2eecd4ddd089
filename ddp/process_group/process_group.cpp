#include <ddp/process_group/process_group.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/error_text.h>
#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/process_group/rendezvous.h>

namespace ddp {
namespace {

using std::chrono::milliseconds;

struct Group {
  ProcessGroup process_group;
  std::shared_ptr<detail::StoreChannel> channel;
  bool serves_store = false;
};

/// The process's groups. Never destroyed: what is left of them at exit is closed by close_at_exit,
/// before LibTorch's own statics go.
struct Registry {
  std::mutex mutex;
  ProcessGroup default_group;
  std::map<c10d::ProcessGroup*, Group> groups;
  std::uint64_t generation = 0;
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

ProcessGroup make_group(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
                        int world_size, const std::string& address, milliseconds timeout,
                        const std::shared_ptr<detail::StoreChannel>& channel) {
  // Python's order and prefixes (distributed_c10d.py, _new_process_group_helper): a job may mix
  // Python and C++ ranks.
  channel->announce();
  const auto group_store = c10::make_intrusive<c10d::PrefixStore>(name + "/", store);
  const auto device_store = c10::make_intrusive<c10d::PrefixStore>("cpu/", group_store);
  const auto backend = detail::make_gloo_backend(device_store, rank, world_size, address, timeout);
  const auto kind = c10d::ProcessGroup::BackendType::GLOO;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(group_store, rank, world_size);
  group->setDefaultBackend(kind);
  for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    group->setBackend(device, kind, backend);
  }
  backend->setSequenceNumberForGroup();
  group->setGroupName(name);
  group->setGroupDesc("default_pg");
  channel->find_members();
  channel->set_process_group(group);
  return group;
}

/// How long the rank that serves the store waits for the good-byes of the others.
milliseconds goodbye_patience(const Group& group) {
  if (group.channel->failed()) {
    return milliseconds(3000);
  }
  return std::min<milliseconds>(group.channel->timeout(), std::chrono::minutes(5));
}

void close(Group& group) {
  const auto missing = group.channel->say_goodbye(group.serves_store, goodbye_patience(group));
  if (!missing.empty() && !group.channel->failed()) {
    std::fputs(fmt::format("ddp: rank {}: destroy_process_group(): no good-bye from rank {}; closing the store\n",
                           group.channel->rank(), fmt::join(missing, ", "))
                   .c_str(),
               stderr);
  }
  group.process_group.reset();
  group.channel.reset();
}

/// A program that ends without destroy_process_group() still closes its connections before
/// LibTorch's statics are destroyed, and waits for nobody.
void close_at_exit() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.default_group.reset();
  all.groups.clear();
}

detail::Rendezvous meet(const InitProcessGroupOptions& options, std::uint64_t generation) {
  if (!options.store()) {
    const auto& method = options.init_method();
    return detail::rendezvous(method.empty() ? "env://" : method, options.rank(), options.world_size(), generation,
                              options.timeout());
  }
  if (!options.init_method().empty()) {
    throw UsageError("init_process_group: give either a store or an init_method, not both");
  }
  if (options.world_size() < 1 || options.rank() < 0 || options.rank() >= options.world_size()) {
    throw UsageError(fmt::format(
        "init_process_group: a store of the program's own needs rank and world_size beside it; found rank {} and "
        "world_size {}",
        options.rank(), options.world_size()));
  }
  detail::Rendezvous meeting;
  meeting.store = options.store();
  meeting.store->setTimeout(options.timeout());
  meeting.rank = options.rank();
  meeting.world_size = options.world_size();
  meeting.address = "127.0.0.1";
  return meeting;
}

void check_backend(const std::string& backend) {
  if (!backend.empty() && backend != "gloo") {
    throw UsageError(fmt::format(
        "init_process_group: the backend \"{}\" is not in this build; use \"gloo\", or \"\" for the best one here",
        backend));
  }
}

}  // namespace

void init_process_group(const InitProcessGroupOptions& options) {
  auto& all = registry();
  if (is_initialized()) {
    throw UsageError(
        "init_process_group: the default process group exists already; call destroy_process_group() first");
  }
  check_backend(options.backend());
  if (options.timeout() <= milliseconds::zero()) {
    throw UsageError(
        fmt::format("init_process_group: timeout is {} ms; it must be positive", options.timeout().count()));
  }
  const auto meeting = meet(options, all.generation);
  ++all.generation;
  Group group;
  group.serves_store = meeting.serves_store;
  group.channel = std::make_shared<detail::StoreChannel>(
      c10::make_intrusive<c10d::PrefixStore>("0/", meeting.store), meeting.rank, meeting.world_size,
      options.timeout());
  try {
    group.process_group = make_group(meeting.store, "0", meeting.rank, meeting.world_size, meeting.address,
                                     options.timeout(), group.channel);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError(fmt::format(
        "rank {} of {}: could not connect to the other ranks over Gloo from {} within {:.1f} s ({}). Check that the "
        "ranks' machines reach each other; GLOO_SOCKET_IFNAME names the interface to use.",
        meeting.rank, meeting.world_size, meeting.address, std::chrono::duration<double>(options.timeout()).count(),
        detail::concise(error)));
  }
  static const bool registered = (std::atexit(close_at_exit), true);
  (void)registered;
  const std::lock_guard lock(all.mutex);
  all.default_group = group.process_group;
  all.groups.emplace(group.process_group.get(), group);
}

void destroy_process_group(const ProcessGroup& group) {
  auto& all = registry();
  std::map<c10d::ProcessGroup*, Group> closing;
  {
    const std::lock_guard lock(all.mutex);
    if (group && group != all.default_group) {
      if (auto node = all.groups.extract(group.get())) {
        closing.insert(std::move(node));
      }
    } else {
      closing.swap(all.groups);
    }
  }
  for (auto& [key, entry] : closing) {
    if (entry.process_group != all.default_group) {
      close(entry);
    }
  }
  const auto entry = closing.find(all.default_group.get());
  if (entry != closing.end()) {
    all.default_group.reset();
    close(entry->second);
  }
}

bool is_initialized() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  return static_cast<bool>(all.default_group);
}

ProcessGroup default_group() { return detail::resolve_group({}); }

int get_rank(const ProcessGroup& group) { return detail::resolve_group(group)->getRank(); }

int get_world_size(const ProcessGroup& group) { return detail::resolve_group(group)->getSize(); }

std::string get_backend(const ProcessGroup& group) { return detail::resolve_group(group)->getBackendName(); }

int local_rank() { return static_cast<int>(detail::environment_integer("LOCAL_RANK", 0, 1 << 20, 0)); }

int local_world_size() { return static_cast<int>(detail::environment_integer("LOCAL_WORLD_SIZE", 1, 1 << 20, 1)); }

c10::Device local_device() { return {c10::DeviceType::CPU}; }

namespace detail {

ProcessGroup resolve_group(const ProcessGroup& group) {
  if (group) {
    return group;
  }
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  if (!all.default_group) {
    throw UsageError("there is no default process group: call ddp::init_process_group() first, on every rank");
  }
  return all.default_group;
}

std::shared_ptr<StoreChannel> channel_of(const ProcessGroup& group) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& entry = all.groups[group.get()];
  if (!entry.channel) {
    const auto store = group->getStore();
    if (!store) {
      all.groups.erase(group.get());
      throw UsageError(
          "the process group has no store: construct c10d::ProcessGroup with the store that its ranks share");
    }
    entry.process_group = group;
    entry.channel = std::make_shared<StoreChannel>(store, group->getRank(), group->getSize(), store->getTimeout());
    entry.channel->assume_all_members();
    entry.channel->set_process_group(group);
  }
  return entry.channel;
}

}  // namespace detail
}  // namespace ddp
