#pragma once

#include <string>
#include <vector>

#include <launcher/gpus.h>

namespace ddp::launcher {

/// Cores, by their numbers, in ascending order.
using CpuSet = std::vector<int>;

/// Reads the kernel's form, "0-3,8". What is no number ends the reading.
CpuSet parse_cpu_list(const std::string& text);

/// The cores for each of `workers`: those of the NUMA node of its GPU (worker i has GPU i), or,
/// where there is no GPU, those of the machine's nodes in turn, neighbours together. Only cores
/// that the launcher itself may use. Throws Error where the machine does not tell its nodes, and
/// where there are GPUs, but fewer than workers.
std::vector<CpuSet> numa_cpus(int workers, const Gpus& gpus);

}  // namespace ddp::launcher
