#pragma once

#include <string>
#include <vector>

namespace ddp::launcher {

/// Cores, by their numbers, in ascending order.
using CpuSet = std::vector<int>;

/// Reads the kernel's form, "0-3,8". What is no number ends the reading.
CpuSet parse_cpu_list(const std::string& text);

/// The kernel's form of a set, "0-3,8".
std::string cpu_list(const CpuSet& cpus);

/// How this machine's cores belong together, as the kernel says in sysfs. "Core" is here what the
/// kernel calls a CPU: one of a physical core's hardware threads. The functions throw Error where
/// the kernel does not say.
class CpuTopology {
 public:
  /// `allowed`: the cores that may be used. `root`: where sysfs is; tests have one of their own.
  explicit CpuTopology(CpuSet allowed, std::string root = "/sys");

  /// The NUMA nodes that have cores.
  std::vector<int> nodes() const;

  /// The NUMA node of a PCI device, by its address, "0000:3b:00.0".
  int node_of_device(const std::string& address) const;

  /// The allowed cores of a node; empty where there are none.
  CpuSet cores_of_node(int node) const;

  /// The number of the socket that holds a core.
  int socket_of(int core) const;

  /// The hardware threads of the physical core that a core belongs to.
  CpuSet physical_core_of(int core) const;

  /// The cores that share the core's largest cache (of data), mostly the third level.
  CpuSet core_complex_of(int core) const;

 private:
  std::string file_of_core(int core, const std::string& file) const;

  CpuSet allowed_;
  std::string root_;
};

}  // namespace ddp::launcher
