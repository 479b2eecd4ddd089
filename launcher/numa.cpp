#include <algorithm>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include <launcher/cores.h>
#include <launcher/error.h>
#include <launcher/numa.h>
#include <launcher/option_values.h>

namespace ddp::launcher {
namespace {

constexpr const char* kNodes = "/sys/devices/system/node";
constexpr int kMostCores = 1 << 20;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The NUMA node of a PCI device. The kernel says -1 on machines that have one node only.
int node_of_device(const std::string& address) {
  const std::string text = first_line(fmt::format("/sys/bus/pci/devices/{}/numa_node", address));
  return parse_whole_number(text, 0, kMostCores).value_or(0);
}

}  // namespace

CpuSet parse_cpu_list(const std::string& text) {
  CpuSet cpus;
  for (const std::string_view part : split_at_commas(text)) {
    const auto dash = part.find('-');
    const auto first = parse_whole_number(part.substr(0, dash), 0, kMostCores);
    const auto last = dash == std::string_view::npos
                          ? first
                          : parse_whole_number(part.substr(dash + 1), 0, kMostCores);
    if (!first || !last) break;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

std::vector<CpuSet> numa_cpus(int workers, const Gpus& gpus) {
  const CpuSet nodes = parse_cpu_list(first_line(fmt::format("{}/has_cpu", kNodes)));
  if (nodes.empty()) {
    throw Error(ExitStatus::kSetup,
                fmt::format("--numa_binding: this machine does not tell its NUMA nodes ({}/has_cpu)"
                            "\nLeave the option out.",
                            kNodes));
  }
  if (gpus.count() > 0 && gpus.count() < workers) {
    throw Error(ExitStatus::kSetup,
                fmt::format("--numa_binding: {} workers, but {} visible GPU{}\nStart as many "
                            "workers as there are GPUs, or leave the option out.",
                            workers, gpus.count(), gpus.count() == 1 ? "" : "s"));
  }
  const CpuSet allowed = allowed_cores();
  std::vector<CpuSet> result;
  for (int worker = 0; worker < workers; ++worker) {
    const auto index = static_cast<size_t>(worker);
    const int node = gpus.count() > 0 ? node_of_device(gpus.pci_addresses[index])
                                      : nodes[index * nodes.size() / static_cast<size_t>(workers)];
    const CpuSet cpus = parse_cpu_list(first_line(fmt::format("{}/node{}/cpulist", kNodes, node)));
    CpuSet usable;
    std::set_intersection(cpus.begin(), cpus.end(), allowed.begin(), allowed.end(),
                          std::back_inserter(usable));
    if (usable.empty()) {
      throw Error(ExitStatus::kSetup,
                  fmt::format("--numa_binding: the launcher may use no core of NUMA node {}, where "
                              "local rank {} belongs",
                              node, worker));
    }
    result.push_back(std::move(usable));
  }
  return result;
}

}  // namespace ddp::launcher
