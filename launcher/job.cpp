#include <utility>

#include <fmt/format.h>

#include <launcher/cores.h>
#include <launcher/elastic/store_plugin.h>
#include <launcher/environment.h>
#include <launcher/job.h>
#include <launcher/option_values.h>

namespace ddp::launcher {
namespace {

/// One GPU for each worker, of those that the launcher itself may use.
std::vector<std::string> one_device_each(const Options& options, const VariableLookup& variables) {
  std::vector<std::string> devices;
  const char* given = variables("CUDA_VISIBLE_DEVICES");
  for (const std::string_view device : split_at_commas(given != nullptr ? given : ""))
    devices.emplace_back(device);
  if (given == nullptr) {
    for (int i = 0; i < options.nproc_per_node; ++i) devices.push_back(std::to_string(i));
  }
  if (devices.size() < static_cast<size_t>(options.nproc_per_node)) {
    usage_error(
        fmt::format("--virtual_local_rank needs a GPU for each of the {} workers, and "
                    "CUDA_VISIBLE_DEVICES={} has {}",
                    options.nproc_per_node, given, devices.size()));
  }
  return devices;
}

}  // namespace

Job prepare_job(Options options, const VariableLookup& variables) {
  Job job;
  job.command = make_command(options, variables);
  if (options.virtual_local_rank) job.devices = one_device_each(options, variables);
  if (options.numa_binding != NumaBinding::kNone) {
    job.cpus = numa_cpus(options.numa_binding, options.nproc_per_node, find_gpus(),
                         CpuTopology(allowed_cores()));
  }
  if (options.elastic) {
    job.store_plugin = find_store_plugin(variables);
    job.master.address = options.elastic->host;
  } else {
    job.master = choose_master(options);
  }
  job.placement = options.placement();
  // The launchers of several nodes do not talk to each other: only a constant is the same on all.
  job.run_id = !options.run_id.empty() ? options.run_id
               : options.nnodes == 1   ? make_run_id()
                                       : "none";
  job.options = std::move(options);
  return job;
}

}  // namespace ddp::launcher
