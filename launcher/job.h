#pragma once

#include <string>
#include <vector>

#include <launcher/command.h>
#include <launcher/gpus.h>
#include <launcher/master.h>
#include <launcher/numa.h>
#include <launcher/options.h>
#include <launcher/placement.h>

namespace ddp::launcher {

/// Everything that is decided before the first worker starts.
struct Job {
  Options options;
  Command command;
  Master master;  ///< of the next attempt, as is the placement
  Placement placement;
  std::string store_plugin;          ///< elastic: the path of the store's library
  std::string run_id;                ///< the same for all attempts
  std::vector<CpuSet> cpus;          ///< for each local rank; empty: they are not bound
  std::vector<std::string> devices;  ///< CUDA_VISIBLE_DEVICES of each; empty: as it is
};

/// Finds the program, decides where the workers meet and what each may use. Throws Error.
Job prepare_job(Options options, const VariableLookup& variables);

}  // namespace ddp::launcher
