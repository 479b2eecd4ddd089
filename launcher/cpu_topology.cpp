#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <launcher/cpu_topology.h>
#include <launcher/error.h>
#include <launcher/option_values.h>

namespace ddp::launcher {
namespace {

constexpr int kMostCores = 1 << 20;
constexpr int kMostCaches = 64;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

[[noreturn]] void not_said(const char* what, const std::string& path) {
  throw Error(ExitStatus::kSetup,
              fmt::format("--numa_binding: this machine does not tell {} ({})\nLeave the option "
                          "out, or take another mode.",
                          what, path));
}

CpuSet read_set(const char* what, const std::string& path) {
  CpuSet cpus = parse_cpu_list(first_line(path));
  if (cpus.empty()) not_said(what, path);
  return cpus;
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
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string cpu_list(const CpuSet& cpus) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    ranges.push_back(end - i == 1 ? std::to_string(cpus[i])
                                  : fmt::format("{}-{}", cpus[i], cpus[end - 1]));
    i = end;
  }
  return fmt::format("{}", fmt::join(ranges, ","));
}

CpuTopology::CpuTopology(CpuSet allowed, std::string root)
    : allowed_(std::move(allowed)), root_(std::move(root)) {}

std::vector<int> CpuTopology::nodes() const {
  return read_set("its NUMA nodes", root_ + "/devices/system/node/has_cpu");
}

int CpuTopology::node_of_device(const std::string& address) const {
  // The kernel says -1 on machines that have one node only.
  const std::string text =
      first_line(fmt::format("{}/bus/pci/devices/{}/numa_node", root_, address));
  return parse_whole_number(text, 0, kMostCores).value_or(0);
}

CpuSet CpuTopology::cores_of_node(int node) const {
  const CpuSet cpus =
      parse_cpu_list(first_line(fmt::format("{}/devices/system/node/node{}/cpulist", root_, node)));
  CpuSet usable;
  std::set_intersection(cpus.begin(), cpus.end(), allowed_.begin(), allowed_.end(),
                        std::back_inserter(usable));
  return usable;
}

std::string CpuTopology::file_of_core(int core, const std::string& file) const {
  return fmt::format("{}/devices/system/cpu/cpu{}/{}", root_, core, file);
}

int CpuTopology::socket_of(int core) const {
  const std::string path = file_of_core(core, "topology/physical_package_id");
  const auto socket = parse_whole_number(first_line(path), -1, kMostCores);
  if (!socket) not_said("its sockets", path);
  return *socket;
}

CpuSet CpuTopology::physical_core_of(int core) const {
  return read_set("its physical cores", file_of_core(core, "topology/thread_siblings_list"));
}

CpuSet CpuTopology::core_complex_of(int core) const {
  const std::string folder = file_of_core(core, "cache");
  int largest = -1;
  std::string cache;
  for (int index = 0; index < kMostCaches; ++index) {
    const std::string candidate = fmt::format("{}/index{}", folder, index);
    if (::access(candidate.c_str(), F_OK) != 0) break;
    const std::string type = first_line(candidate + "/type");
    const auto level = parse_whole_number(first_line(candidate + "/level"), 0, kMostCaches);
    if ((type != "Unified" && type != "Data") || !level || *level <= largest) continue;
    largest = *level;
    cache = candidate;
  }
  if (cache.empty()) not_said("its caches", folder);
  return read_set("its caches", cache + "/shared_cpu_list");
}

}  // namespace ddp::launcher
