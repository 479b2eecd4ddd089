#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/numa.h>

namespace ddp::launcher {
namespace {

/// The NUMA node of each GPU, or where there is none of each worker.
std::vector<int> homes(int workers, const Gpus& gpus, const CpuTopology& topology) {
  const std::vector<int> nodes = topology.nodes();
  std::vector<int> result;
  for (const std::string& address : gpus.pci_addresses)
    result.push_back(topology.node_of_device(address));
  if (!result.empty()) return result;
  const auto count = static_cast<size_t>(workers);
  for (size_t worker = 0; worker < count; ++worker)
    result.push_back(nodes[worker * nodes.size() / count]);
  return result;
}

CpuSet cores_of_node(int node, size_t worker, const CpuTopology& topology) {
  CpuSet cores = topology.cores_of_node(node);
  if (cores.empty()) {
    throw Error(
        ExitStatus::kSetup,
        fmt::format("--numa_binding: the launcher may use no core of NUMA node {}, where "
                    "local rank {} belongs\nLeave the option out, or let the launcher use more "
                    "cores (taskset, the batch system).",
                    node, worker));
  }
  return cores;
}

CpuSet cores_of_socket(int node, size_t worker, const CpuTopology& topology) {
  const int socket = topology.socket_of(cores_of_node(node, worker, topology).front());
  CpuSet all;
  for (const int other : topology.nodes()) {
    const CpuSet cores = topology.cores_of_node(other);
    if (cores.empty() || topology.socket_of(cores.front()) != socket) continue;
    all.insert(all.end(), cores.begin(), cores.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

/// Cores by the lowest number in what they belong to.
template <typename Whole>
std::map<int, CpuSet> grouped(const CpuSet& cores, const Whole& whole_of) {
  std::map<int, CpuSet> groups;
  for (const int core : cores) groups[whole_of(core).front()].push_back(core);
  return groups;
}

/// Share number `index` of `count`: the first ones get one physical core more where it does not
/// come out even.
CpuSet exclusive_cores(int node, size_t worker, size_t index, size_t count,
                       const CpuTopology& topology) {
  const auto physical = grouped(cores_of_node(node, worker, topology),
                                [&](int core) { return topology.physical_core_of(core); });
  if (physical.size() < count) {
    throw Error(ExitStatus::kSetup,
                fmt::format("--numa_binding=exclusive: {} physical core{} of NUMA node {} are too "
                            "few for the {} that belong there\nStart fewer workers, or take "
                            "'node' instead.",
                            physical.size(), physical.size() == 1 ? "" : "s", node, count));
  }
  const size_t each = physical.size() / count;
  const size_t more = physical.size() % count;
  const size_t begin = index * each + std::min(index, more);
  const size_t end = begin + each + (index < more ? 1 : 0);
  CpuSet share;
  size_t i = 0;
  for (const auto& [first, threads] : physical) {
    if (i >= begin && i < end) share.insert(share.end(), threads.begin(), threads.end());
    ++i;
  }
  std::sort(share.begin(), share.end());
  return share;
}

/// Complex number `index`, from the start again where there are fewer; those with the most cores
/// first.
CpuSet complex_cores(int node, size_t worker, size_t index, const CpuTopology& topology) {
  const auto groups = grouped(cores_of_node(node, worker, topology),
                              [&](int core) { return topology.core_complex_of(core); });
  std::vector<CpuSet> complexes;
  for (const auto& [first, cores] : groups) complexes.push_back(cores);
  std::stable_sort(complexes.begin(), complexes.end(),
                   [](const CpuSet& a, const CpuSet& b) { return a.size() > b.size(); });
  return complexes[index % complexes.size()];
}

}  // namespace

NumaBinding numa_binding(std::string_view name) {
  if (name == "node") return NumaBinding::kNode;
  if (name == "socket") return NumaBinding::kSocket;
  if (name == "exclusive") return NumaBinding::kExclusive;
  if (name == "core-complex" || name == "core_complex") return NumaBinding::kCoreComplex;
  return NumaBinding::kNone;
}

std::vector<CpuSet> numa_cpus(NumaBinding binding, int workers, const Gpus& gpus,
                              const CpuTopology& topology) {
  if (gpus.count() > 0 && gpus.count() < workers) {
    throw Error(ExitStatus::kSetup,
                fmt::format("--numa_binding: {} workers, but {} visible GPU{}\nStart as many "
                            "workers as there are GPUs, or leave the option out.",
                            workers, gpus.count(), gpus.count() == 1 ? "" : "s"));
  }
  const std::vector<int> home = homes(workers, gpus, topology);
  std::vector<CpuSet> result;
  for (size_t worker = 0; worker < static_cast<size_t>(workers); ++worker) {
    const int node = home[worker];
    const auto own = home.begin() + static_cast<std::ptrdiff_t>(worker);
    const auto index = static_cast<size_t>(std::count(home.begin(), own, node));
    switch (binding) {
      case NumaBinding::kNone:
        return {};
      case NumaBinding::kNode:
        result.push_back(cores_of_node(node, worker, topology));
        break;
      case NumaBinding::kSocket:
        result.push_back(cores_of_socket(node, worker, topology));
        break;
      case NumaBinding::kExclusive: {
        const auto count = static_cast<size_t>(std::count(home.begin(), home.end(), node));
        result.push_back(exclusive_cores(node, worker, index, count, topology));
        break;
      }
      case NumaBinding::kCoreComplex:
        result.push_back(complex_cores(node, worker, index, topology));
        break;
    }
  }
  return result;
}

}  // namespace ddp::launcher
