#include <algorithm>
#include <climits>
#include <string_view>

#include <fmt/format.h>

#include <launcher/batch_system.h>
#include <launcher/option_values.h>

namespace ddp::launcher {
namespace {

/// SLURM jobs that share a node need different ports, the same on all nodes: below the range that
/// the kernel gives to who asks for any.
constexpr long long kFirstPort = 15000;
constexpr long long kPorts = 15000;

std::string text_of(const VariableLookup& variables, const char* name) {
  const char* text = variables(name);
  return text != nullptr ? text : "";
}

/// -1 where the variable is not set or no number.
int number_of(const VariableLookup& variables, const char* name) {
  return parse_whole_number(text_of(variables, name), 0, INT_MAX).value_or(-1);
}

std::optional<BatchJob> read_slurm_step(const VariableLookup& variables) {
  BatchJob job;
  job.nnodes = number_of(variables, "SLURM_STEP_NUM_NODES");
  job.node_rank = number_of(variables, "SLURM_NODEID");
  const std::string hosts = text_of(variables, "SLURM_STEP_NODELIST");
  if (job.nnodes < 1 || job.node_rank < 0 || hosts.empty()) return {};
  const int tasks = number_of(variables, "SLURM_STEP_NUM_TASKS");
  if (tasks > job.nnodes) {
    usage_error(
        fmt::format("SLURM started {} launchers on {} node{}, and one for each node is needed: it "
                    "starts the node's workers itself.\nGive srun --ntasks-per-node=1, and launch "
                    "--nproc_per_node=N; or --standalone for jobs that do not belong together.",
                    tasks, job.nnodes, job.nnodes == 1 ? "" : "s"));
  }
  job.master_addr = first_host(hosts);
  const int id = number_of(variables, "SLURM_JOB_ID");
  const int step = number_of(variables, "SLURM_STEP_ID");
  if (id >= 0) {
    job.master_port =
        static_cast<int>(kFirstPort + (static_cast<long long>(id) + std::max(step, 0)) % kPorts);
    job.run_id = fmt::format("slurm-{}.{}", id, std::max(step, 0));
  }
  return job;
}

std::optional<BatchJob> read_open_mpi(const VariableLookup& variables) {
  BatchJob job;
  job.nnodes = number_of(variables, "OMPI_COMM_WORLD_SIZE");
  job.node_rank = number_of(variables, "OMPI_COMM_WORLD_RANK");
  if (job.nnodes < 1 || job.node_rank < 0) return {};
  const int here = number_of(variables, "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (here > 1) {
    usage_error(
        fmt::format("mpirun started {} launchers on this node, and one for each node is needed: it "
                    "starts the node's workers itself.\nGive mpirun --map-by ppr:1:node, and "
                    "launch --nproc_per_node=N; or --standalone for jobs that do not belong "
                    "together.",
                    here));
  }
  // Open MPI does not say where rank 0 is; `mpirun -x MASTER_ADDR` does.
  job.master_addr = text_of(variables, "MASTER_ADDR");
  job.master_port = parse_whole_number(text_of(variables, "MASTER_PORT"), 1, 65535).value_or(0);
  return job;
}

}  // namespace

std::string first_host(const std::string& list) {
  // A list is NAMES,NAMES,...; a name may have several parts in brackets, each a list of numbers
  // and ranges, of which the first number is taken as it is written: leading zeros count.
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host.push_back(list[i]);
      continue;
    }
    const auto end = std::min(list.find(']', i), list.size());
    const std::string_view inside = std::string_view(list).substr(i + 1, end - i - 1);
    host.append(inside.substr(0, inside.find_first_of(",-")));
    i = end;
  }
  return host;
}

std::optional<BatchJob> read_batch_job(const VariableLookup& variables) {
  if (variables("TORCHELASTIC_RUN_ID") != nullptr) return {};
  if (auto job = read_slurm_step(variables)) return job;
  return read_open_mpi(variables);
}

}  // namespace ddp::launcher
