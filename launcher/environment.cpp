#include <sys/random.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <launcher/cores.h>
#include <launcher/environment.h>

namespace ddp::launcher {
namespace {

constexpr const char* kDevicesVariable = "CUDA_VISIBLE_DEVICES";

/// Set for every worker, whatever the launcher's own environment has: it may itself have been
/// started by a launcher.
constexpr std::array<std::string_view, 17> kOverridden = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    kErrorFileVariable,
    kListenFdVariable,
};

/// For glibc (mallopt(3)): no piece has a mapping of its own, which would go with it, nothing is
/// given back to the system, and the heap grows by much at once.
constexpr std::array<std::pair<std::string_view, const char*>, 3> kMallocSettings = {{
    {"MALLOC_MMAP_MAX_", "0"},
    {"MALLOC_TRIM_THRESHOLD_", "4000000000"},
    {"MALLOC_TOP_PAD_", "268435456"},
}};

bool names(std::string_view entry, std::string_view name) {
  return entry.substr(0, entry.find('=')) == name;
}

}  // namespace

WorkerEnvironment::WorkerEnvironment(const char* const* inherited, const Job& job,
                                     const Master& master, int restart_count)
    : job_(job), listen_fd_(master.reserved.get()) {
  const Options& options = job.options;
  bool has_omp_threads = false;
  bool has_nccl_handling = false;
  bool has_gloo_interface = false;
  for (; *inherited != nullptr; ++inherited) {
    const std::string_view entry = *inherited;
    const std::string_view name = entry.substr(0, entry.find('='));
    if (std::find(kOverridden.begin(), kOverridden.end(), name) != kOverridden.end()) continue;
    if (!job.devices.empty() && name == kDevicesVariable) continue;
    has_omp_threads |= name == "OMP_NUM_THREADS";
    has_nccl_handling |= name == "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    has_gloo_interface |= name == "GLOO_SOCKET_IFNAME";
    kept_.push_back(*inherited);
  }

  const std::string world_size = std::to_string(job.placement.world_size);
  set(common_, "WORLD_SIZE", world_size);
  set(common_, "LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node));
  set(common_, "GROUP_RANK", std::to_string(job.placement.node_rank));
  set(common_, "GROUP_WORLD_SIZE", std::to_string(job.placement.nnodes));
  set(common_, "ROLE_NAME", options.role);
  set(common_, "ROLE_WORLD_SIZE", world_size);
  set(common_, "MASTER_ADDR", master.address);
  set(common_, "MASTER_PORT", std::to_string(master.port));
  set(common_, "TORCHELASTIC_RESTART_COUNT", std::to_string(restart_count));
  set(common_, "TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts));
  set(common_, "TORCHELASTIC_RUN_ID", job.run_id);
  // Rank 0 serves the store itself.
  set(common_, "TORCHELASTIC_USE_AGENT_STORE", "False");
  if (!has_nccl_handling) set(common_, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  if (!has_omp_threads && options.nproc_per_node > 1) {
    set(common_, "OMP_NUM_THREADS",
        std::to_string(std::max(1, available_cores() / options.nproc_per_node)));
  }
  if (!has_gloo_interface && master.loopback) set(common_, "GLOO_SOCKET_IFNAME", "lo");
  if (options.tune_malloc) tune_malloc();
}

void WorkerEnvironment::tune_malloc() {
  for (const auto& [name, value] : kMallocSettings) {
    const bool has_own = std::any_of(kept_.begin(), kept_.end(), [name = name](const char* entry) {
      return names(entry, name);
    });
    if (!has_own) set(common_, name.data(), value);
  }
}

void WorkerEnvironment::set(std::vector<std::string>& to, const char* name,
                            const std::string& value) {
  to.push_back(fmt::format("{}={}", name, value));
}

char* const* WorkerEnvironment::of(int local_rank, const std::string& error_file) {
  const int rank = job_.placement.rank(local_rank);
  const bool virtual_rank = !job_.devices.empty();
  own_.clear();
  set(own_, "RANK", std::to_string(rank));
  set(own_, "LOCAL_RANK", std::to_string(virtual_rank ? 0 : local_rank));
  set(own_, "ROLE_RANK", std::to_string(rank));
  if (listen_fd_ >= 0 && rank == 0) set(own_, kListenFdVariable, std::to_string(listen_fd_));
  if (virtual_rank) set(own_, kDevicesVariable, job_.devices[static_cast<size_t>(local_rank)]);
  if (!error_file.empty()) set(own_, kErrorFileVariable, error_file);

  pointers_.clear();
  // execve takes pointers to char for the sake of old programs; it does not write.
  for (const char* entry : kept_) pointers_.push_back(const_cast<char*>(entry));
  for (std::string& entry : common_) pointers_.push_back(entry.data());
  for (std::string& entry : own_) pointers_.push_back(entry.data());
  pointers_.push_back(nullptr);
  return pointers_.data();
}

std::vector<std::string> WorkerEnvironment::own_variables() const {
  std::vector<std::string> all = own_;
  all.insert(all.end(), common_.begin(), common_.end());
  return all;
}

std::string make_run_id() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof(bits), GRND_NONBLOCK) != static_cast<ssize_t>(sizeof(bits))) {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    bits = static_cast<uint64_t>(now.tv_nsec) ^ (static_cast<uint64_t>(now.tv_sec) << 32);
  }
  return fmt::format("{:016x}", bits);
}

}  // namespace ddp::launcher
