#pragma once

#include <string_view>
#include <vector>

#include <launcher/cpu_topology.h>
#include <launcher/gpus.h>

namespace ddp::launcher {

/// Which cores a worker may run on, as torchrun's --numa-binding has it (torch/numa/binding.py).
/// "Its" node is that of its GPU.
enum class NumaBinding {
  kNone,         ///< all
  kNode,         ///< those of its NUMA node
  kSocket,       ///< those of all NUMA nodes of the socket that has its node
  kExclusive,    ///< a part of its node's physical cores, which no other worker has
  kCoreComplex,  ///< a group of its node's cores that share a cache, another one for each GPU as
                 ///< far as they go
};

/// "node", "socket", "exclusive" or "core-complex" ('_' taken as '-'); kNone for anything else.
NumaBinding numa_binding(std::string_view name);

/// The cores for each of `workers`. Worker i has GPU i; what a node's cores are divided by is the
/// number of all GPUs there, whoever uses them. Where there is no GPU the machine's nodes take
/// their place: worker i belongs to one of them, in turn, neighbours together. Throws Error where
/// the machine does not tell what is needed, where there are GPUs, but fewer than workers, and
/// where there are not enough cores.
std::vector<CpuSet> numa_cpus(NumaBinding binding, int workers, const Gpus& gpus,
                              const CpuTopology& topology);

}  // namespace ddp::launcher
