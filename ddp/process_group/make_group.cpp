#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/backend_choice.h>
#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/make_group.h>
#include <ddp/process_group/nccl/cuda_device.h>
#include <ddp/process_group/shm/shm_backend.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string failure_text(const GroupPlan& plan, StoreChannel& channel,
                         const std::exception& error) {
  const auto begin = fmt::format("rank {}: ", plan.ranks[plan.rank]);
  if (store_failure(error).kind() == StoreFailure::Kind::kClosed) {
    return begin + fmt::format(
                       "the store at {} was closed before all ranks were connected: rank 0, which "
                       "serves it, has ended "
                       "(see its log), or does not answer",
                       plan.where);
  }
  // Where it failed early, not for those who may still come.
  const bool is_late = Clock::now() >= plan.deadline - plan.timeout / 10;
  auto missing = is_late ? channel.not_announced() : std::vector<int>();
  for (int& rank : missing) {
    rank = plan.ranks[rank];
  }
  if (!missing.empty()) {
    return begin + fmt::format(
                       "rank{} {} of the group \"{}\" did not come to {} within {:.1f} s. Every "
                       "member must "
                       "make the group; look into the logs of what is missing. (A file that is "
                       "left from an "
                       "earlier run must be deleted.)",
                       missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), plan.name,
                       plan.where, std::chrono::duration<double>(plan.timeout).count());
  }
  const auto why = concise(error);
  if (why.find("closed by peer") != std::string::npos ||
      why.find("reset by peer") != std::string::npos) {
    return begin + fmt::format(
                       "a rank left while the ranks of the group \"{}\" were connecting ({}); look "
                       "into the other ranks' logs for the one that ended first",
                       plan.name, why);
  }
  return begin +
         fmt::format(
             "could not connect to the other ranks over Gloo from {} within {:.1f} s ({}). Check "
             "that the "
             "ranks' machines reach each other; GLOO_SOCKET_IFNAME names the interface to use.",
             plan.address, std::chrono::duration<double>(plan.timeout).count(), why);
}

/// c10d knows the names of its own backends only, and which of these number their calls.
class SharedMemoryGroup final : public c10d::ProcessGroup {
 public:
  SharedMemoryGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                    bool has_nccl)
      : ProcessGroup(store, rank, world_size), name_(has_nccl ? "nccl" : "shm") {}
  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override {
    getBackend(c10::DeviceType::CPU)->setSequenceNumberForGroup();
  }
  std::uint64_t getSequenceNumberForGroup() override {
    return getBackend(c10::DeviceType::CPU)->getSequenceNumberForGroup();
  }

 private:
  const std::string name_;
};

c10::intrusive_ptr<c10d::Backend> connect_nccl(const GroupPlan& plan,
                                               const c10::intrusive_ptr<c10d::Store>& store) {
  const auto who = fmt::format("rank {}: ", plan.ranks[plan.rank]);
  NcclSettings settings;
  settings.rank = plan.rank;
  settings.world_size = static_cast<int>(plan.ranks.size());
  settings.name = plan.name;
  settings.ranks = plan.ranks;
  settings.device = local_rank();
  settings.timeout = plan.timeout;
  const auto& plugin = use_cuda_device(settings.device, who);
  try {
    return plugin.make_backend(c10::make_intrusive<c10d::PrefixStore>("cuda/", store), settings);
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("{}NCCL cannot be used: {}", who, concise(error)));
  }
}

/// What `decide` returns. Where it refuses, from words that all ranks have read, all hear why.
template <class Decide>
auto decided_by_all(StoreChannel& channel, const Decide& decide) {
  try {
    return decide();
  } catch (const UsageError& refusal) {
    channel.refuse(refusal.what());
    throw;
  }
}

}  // namespace

Group make_group(const GroupPlan& plan) {
  // Python's order and prefixes (distributed_c10d.py, _new_process_group_helper): a job may mix
  // Python and C++ ranks.
  const auto group_store = c10::make_intrusive<c10d::PrefixStore>(plan.name + "/", plan.store);
  const auto device_store = c10::make_intrusive<c10d::PrefixStore>("cpu/", group_store);
  const auto world_size = static_cast<int>(plan.ranks.size());
  Group group;
  group.ranks = plan.ranks;
  group.address = plan.address;
  group.backend = plan.backend;
  group.channel = std::make_shared<StoreChannel>(group_store, plan.rank, world_size, plan.timeout);
  try {
    const auto backends = *parse_backend_names(plan.backend);
    BackendChoice choice(backends, plan.rank, plan.ranks);
    group.channel->announce(choice.announcement());
    GlooSettings settings;
    settings.rank = plan.rank;
    settings.world_size = world_size;
    settings.devices = plan.devices;
    settings.connect_timeout = std::max(
        milliseconds(1), std::chrono::duration_cast<milliseconds>(plan.deadline - Clock::now()));
    settings.timeout = plan.timeout;
    settings.name = plan.name;
    auto backend = make_gloo_backend(device_store, settings);
    group.channel->find_members();
    auto kind = c10d::ProcessGroup::BackendType::GLOO;
    c10::intrusive_ptr<c10d::ProcessGroup> process_group;
    if (auto ranks =
            decided_by_all(*group.channel, [&] { return choice.decide(*group.channel); })) {
      backend =
          c10::make_intrusive<shm::ShmBackend>(plan.rank, std::move(ranks), backend, plan.timeout);
      kind = c10d::ProcessGroup::BackendType::CUSTOM;
      process_group =
          c10::make_intrusive<SharedMemoryGroup>(group_store, plan.rank, world_size, backends.nccl);
    } else {
      process_group = c10::make_intrusive<c10d::ProcessGroup>(group_store, plan.rank, world_size);
    }
    if (!choice.reason().empty() && plan.rank == 0) {
      std::fputs(fmt::format("ddp: rank {}: the ranks of this machine do not share memory, and "
                             "communicate over Gloo: {}\n",
                             plan.ranks[plan.rank], choice.reason())
                     .c_str(),
                 stderr);
    }
    backend = checked(backend, device_store, settings);
    process_group->setBackend(c10::DeviceType::CPU, kind, backend);
    if (backends.nccl) {
      decided_by_all(*group.channel, [&] { choice.check_all_take_nccl(*group.channel); });
      kind = c10d::ProcessGroup::BackendType::NCCL;
      backend = connect_nccl(plan, group_store);
    }
    process_group->setBackend(c10::DeviceType::CUDA, kind, backend);
    process_group->setDefaultBackend(kind);
    process_group->setGroupName(plan.name);
    process_group->setGroupDesc(plan.description);
    group.channel->set_process_group(process_group);
    group.process_group = process_group;
    group.channel->await_connected(plan.deadline);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError(failure_text(plan, *group.channel, error));
  }
  return group;
}

}  // namespace ddp::detail
