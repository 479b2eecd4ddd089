#include <ostream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/logging_data.h>

namespace ddp {
namespace {

std::string text_of(const StepTimes& times, const char* prefix) {
  return fmt::format(
      "{0}forward_compute_time: {1} ns\n{0}backward_compute_time: {2} ns\n"
      "{0}backward_comm_time: {3} ns\n{0}backward_compute_comm_overlap_time: {4} ns\n",
      prefix, times.forward_compute.count(), times.backward_compute.count(),
      times.backward_comm.count(), times.backward_compute_comm_overlap.count());
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const LoggingData& data) {
  std::vector<std::string> buckets;
  for (const auto& bucket : data.rebuilt_per_bucket_param_indices) {
    buckets.push_back(fmt::format("{}", fmt::join(bucket, " ")));
  }
  return stream
         << fmt::format(
                "module_name: {}\nworld_size: {}\nrank: {}\nbackend_name: {}\ndtypes: {}\n"
                "num_parameter_tensors: {}\ntotal_parameter_size_bytes: {}\nhas_sync_bn: {}\n"
                "device_ids: {}\noutput_device: {}\n",
                data.module_name, data.world_size, data.rank, data.backend_name, data.dtypes,
                data.num_parameter_tensors, data.total_parameter_size_bytes, data.has_sync_bn,
                data.device_ids, data.output_device)
         << fmt::format(
                "broadcast_buffers: {}\nfind_unused_parameters: {}\n"
                "gradient_as_bucket_view: {}\nstatic_graph: {}\nbucket_cap_bytes: {}\n"
                "has_comm_hook: {}\njoin_uneven_inputs: {}\n",
                data.broadcast_buffers, data.find_unused_parameters, data.gradient_as_bucket_view,
                data.static_graph, data.bucket_cap_bytes, data.has_comm_hook,
                data.join_uneven_inputs)
         << fmt::format(
                "bucket_sizes: {}\nhas_rebuilt_buckets: {}\nrebuilt_bucket_sizes: {}\n"
                "rebuilt_per_bucket_param_indices: {}\niteration: {}\n"
                "unused_parameter_size: {}\nnum_buckets_reduced: {}\n",
                fmt::join(data.bucket_sizes, ", "), data.has_rebuilt_buckets,
                fmt::join(data.rebuilt_bucket_sizes, ", "), fmt::join(buckets, ", "),
                data.iteration, data.unused_parameter_size, data.num_buckets_reduced)
         << text_of(data.last, "") << text_of(data.average, "avg_")
         << fmt::format("error: {}\n", data.error);
}

}  // namespace ddp
