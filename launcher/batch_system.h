#pragma once

#include <optional>
#include <string>

#include <launcher/variables.h>

namespace ddp::launcher {

/// What the batch system that started this launcher says about the job's nodes.
struct BatchJob {
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr;  ///< empty: it does not say
  int master_port = 0;      ///< 0: it does not say
  std::string run_id;       ///< the same on all nodes; empty: it does not say
};

/// Reads the variables of a SLURM step (srun) or of Open MPI (mpirun), one launcher for each node.
/// Nothing outside of one (a plain sbatch script runs on one node alone, whatever the job has), and
/// nothing in a launcher that a worker of another one has started. Throws Error where
/// several launchers were started on one node.
std::optional<BatchJob> read_batch_job(const VariableLookup& variables);

/// The first host of a SLURM list: "node01" of "node[01-04],login". Empty for an empty list.
std::string first_host(const std::string& list);

}  // namespace ddp::launcher
