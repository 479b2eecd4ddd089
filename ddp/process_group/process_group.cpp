#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/group_end.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/process_group/make_group.h>
#include <ddp/process_group/meeting_place.h>
#include <ddp/process_group/nccl/cuda_device.h>
#include <ddp/process_group/process_group.h>
#include <ddp/process_group/rendezvous.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// How long a store's own timeouts may take longer than the deadline before its calls are ended.
constexpr milliseconds kSlack(500);

/// Gloo writes to its sockets without MSG_NOSIGNAL: a peer that left would end this process with
/// SIGPIPE where an error should be thrown. (Python ignores the signal from its start.) A handler
/// of the program's own stays.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) == 0 &&
      current.sa_handler == SIG_DFL) {
    std::signal(SIGPIPE, SIG_IGN);
  }
}

/// How long the rank that serves the store waits for the good-byes of the others.
milliseconds goodbye_patience(const detail::Group& group) {
  if (!group.channel->failure().empty()) {
    return milliseconds(3000);
  }
  return std::min<milliseconds>(group.channel->timeout(), std::chrono::minutes(5));
}

void close(detail::Group& group) {
  group.channel->say_goodbye();
  // A rank that still waits for this one hears of it now, and not when the last reference goes.
  detail::end_group(*group.process_group, *group.channel, goodbye_patience(group));
  const auto missing = group.leaves_last ? group.channel->await_goodbyes(goodbye_patience(group))
                                         : std::vector<int>{};
  if (!missing.empty() && group.channel->failure().empty()) {
    std::fputs(
        fmt::format(
            "ddp: rank {}: destroy_process_group(): no good-bye from rank {}; closing the store\n",
            group.channel->rank(), fmt::join(missing, ", "))
            .c_str(),
        stderr);
  }
  group.process_group.reset();
  group.channel.reset();
  group.server.reset();
}

/// The process whose exit closes the groups; 0 before the first of them.
std::atomic<pid_t> registered_by{0};

/// A program that ends without destroy_process_group() still closes its connections before
/// LibTorch's statics are destroyed, and waits for nobody: a collective that is still running is
/// ended first, as Gloo's threads would be joined only after its timeout.
void close_at_exit() {
  if (getpid() != registered_by) {
    return;  // a forked process has none of the threads, and the connections are the parent's
  }
  auto& all = detail::group_registry();
  std::map<c10d::ProcessGroup*, detail::Group> groups;
  {
    const std::lock_guard lock(all.mutex);
    all.default_group.reset();
    groups.swap(all.groups);
  }
  for (auto& [key, group] : groups) {
    group.channel->end_operations();
  }
}

void check_options(const InitProcessGroupOptions& options) {
  if (is_initialized()) {
    throw UsageError(
        "init_process_group: the default process group exists already; call "
        "destroy_process_group() first");
  }
  if (!detail::parse_backend_names(options.backend())) {
    throw UsageError(
        fmt::format("init_process_group: the backend \"{}\" is unknown; use \"gloo\", \"shm\", "
                    "\"nccl\", \"cpu:gloo,cuda:nccl\", or \"\" for the best one here",
                    options.backend()));
  }
  if (options.timeout() <= milliseconds::zero()) {
    throw UsageError(fmt::format("init_process_group: timeout is {} ms; it must be positive",
                                 options.timeout().count()));
  }
  try {
    c10d::setDebugLevelFromEnvironment();
  } catch (const std::exception& error) {
    throw UsageError(
        fmt::format("init_process_group: the environment variable TORCH_DISTRIBUTED_DEBUG is "
                    "\"{}\"; expected OFF, INFO or DETAIL",
                    detail::environment("TORCH_DISTRIBUTED_DEBUG").value_or("")));
  }
  if (!options.store()) {
    return;
  }
  if (!options.init_method().empty()) {
    throw UsageError("init_process_group: give either a store or an init_method, not both");
  }
  if (options.world_size() < 1 || options.rank() < 0 || options.rank() >= options.world_size()) {
    throw UsageError(
        fmt::format("init_process_group: a store of the program's own needs rank and world_size "
                    "beside it; found rank {} and "
                    "world_size {}",
                    options.rank(), options.world_size()));
  }
}

detail::MeetingPlace meeting_place(const InitProcessGroupOptions& options) {
  if (!options.store()) {
    const auto& method = options.init_method();
    return detail::locate(method.empty() ? "env://" : method, options.rank(), options.world_size(),
                          options.timeout());
  }
  detail::MeetingPlace place;
  place.rank = options.rank();
  place.world_size = options.world_size();
  place.own_address = "127.0.0.1";
  place.name = "the program's store";
  return place;
}

detail::Group connect(const InitProcessGroupOptions& options, std::uint64_t generation) {
  const auto deadline = Clock::now() + options.timeout();
  const auto place = meeting_place(options);
  const auto backend = detail::resolve_backend_name(options.backend());
  if (detail::parse_backend_names(backend)->nccl) {
    // Before the first wait for others, and before anything is allocated on another device.
    detail::use_cuda_device(local_rank(), fmt::format("rank {}: init_process_group: ", place.rank));
  }
  const auto devices = detail::make_gloo_devices(place.rank, place.own_address);
  const auto port = options.store() ? detail::tcp_port_of(options.store())
                    : place.kind == detail::MeetingPlace::Kind::kTcp ? std::optional(place.port)
                                                                     : std::nullopt;
  const detail::StoreDeadline store_deadline(port, deadline + kSlack);
  try {
    const auto met = options.store() ? detail::meet_at(options.store(), place.rank, generation)
                                     : detail::meet(place, generation, options.timeout(), deadline);
    detail::GroupPlan plan;
    plan.store = met.store;
    plan.name = "0";
    plan.description = "default_pg";
    plan.backend = backend;
    plan.rank = place.rank;
    plan.ranks.resize(place.world_size);
    std::iota(plan.ranks.begin(), plan.ranks.end(), 0);
    plan.devices = devices;
    plan.address = place.own_address;
    plan.timeout = options.timeout();
    plan.deadline = deadline;
    plan.where = place.name;
    auto group = detail::make_group(plan);
    met.store->setTimeout(options.timeout());
    group.server = met.server;
    group.leaves_last = met.leaves_last;
    group.channel->set_serves_store(met.leaves_last);
    return group;
  } catch (const std::exception& error) {
    if (store_deadline.passed() && dynamic_cast<const UsageError*>(&error) == nullptr) {
      throw CommunicationError(fmt::format(
          "rank {}: the store at {} did not answer within {:.1f} s: rank 0 is stopped, or "
          "something else listens on "
          "that port. Check MASTER_ADDR and MASTER_PORT, and rank 0's log. ({})",
          place.rank, place.name, std::chrono::duration<double>(options.timeout()).count(),
          detail::concise(error)));
    }
    if (dynamic_cast<const Error*>(&error) != nullptr) {
      throw;
    }
    throw CommunicationError(
        fmt::format("rank {}: the store at {} failed before all ranks were connected ({})",
                    place.rank, place.name, detail::concise(error)));
  }
}

}  // namespace

void init_process_group(const InitProcessGroupOptions& options) {
  check_options(options);
  ignore_broken_pipes();
  auto& all = detail::group_registry();
  auto group = connect(options, all.generation);
  if (registered_by.exchange(getpid()) == 0) {
    std::atexit(close_at_exit);
  }
  const std::lock_guard lock(all.mutex);
  ++all.generation;
  all.group_count = 1;
  all.groups_of_ranks.clear();
  all.default_group = group.process_group;
  auto* const key = group.process_group.get();
  all.groups.emplace(key, std::move(group));
}

void destroy_process_group(const ProcessGroup& group) {
  auto& all = detail::group_registry();
  std::map<c10d::ProcessGroup*, detail::Group> closing;
  ProcessGroup last;
  {
    const std::lock_guard lock(all.mutex);
    if (group && group != all.default_group) {
      if (auto node = all.groups.extract(group.get())) {
        closing.insert(std::move(node));
      }
    } else {
      closing.swap(all.groups);
      last = std::move(all.default_group);
      all.default_group.reset();
    }
  }
  // The default group's good-byes are also those of all others, whose stores live in its store.
  for (auto& [key, entry] : closing) {
    if (key != last.get()) {
      close(entry);
    }
  }
  if (const auto entry = closing.find(last.get()); last && entry != closing.end()) {
    last.reset();
    close(entry->second);
  }
}

bool is_initialized() {
  auto& all = detail::group_registry();
  const std::lock_guard lock(all.mutex);
  return static_cast<bool>(all.default_group);
}

ProcessGroup default_group() { return detail::resolve_group({}); }

int get_rank(const ProcessGroup& group) {
  return is_member(group) ? detail::resolve_group(group)->getRank() : -1;
}

int get_world_size(const ProcessGroup& group) {
  return is_member(group) ? detail::resolve_group(group)->getSize() : -1;
}

std::string get_backend(const ProcessGroup& group) {
  return detail::resolve_group(group)->getBackendName();
}

int local_rank() {
  return static_cast<int>(detail::environment_integer("LOCAL_RANK", 0, 1 << 20, 0));
}

int local_world_size() {
  return static_cast<int>(detail::environment_integer("LOCAL_WORLD_SIZE", 1, 1 << 20, 1));
}

c10::Device local_device() {
  const auto backend = detail::parse_backend_names(detail::default_backend_name());
  if (!backend || !backend->nccl) {
    return {c10::DeviceType::CPU};
  }
  const int device = local_rank();
  detail::use_cuda_device(device, "local_device: ");
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
}

}  // namespace ddp
