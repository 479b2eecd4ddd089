#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace ddp {

/// How long the parts of one step took on this rank. Of two overlapping parts each has its whole
/// time.
struct StepTimes {
  /// From the last forward's beginning to the first gradient.
  std::chrono::nanoseconds forward_compute{};
  /// From the first gradient to the last one.
  std::chrono::nanoseconds backward_compute{};
  /// From the launch of the first bucket until all are reduced.
  std::chrono::nanoseconds backward_comm{};
  /// From the launch of the first bucket to the last gradient: communication behind computation.
  std::chrono::nanoseconds backward_compute_comm_overlap{};
};

/// What a wrapper is made of and has measured, under the names of Python's
/// `_get_ddp_logging_data()`. It prints itself, one `name: value` a line.
struct LoggingData {
  int world_size = 0;
  int rank = 0;
  std::string backend_name;

  /// The wrapped module's class.
  std::string module_name;
  /// Of the parameters, each once: "float, half".
  std::string dtypes;
  std::size_t num_parameter_tensors = 0;
  std::int64_t total_parameter_size_bytes = 0;
  bool has_sync_bn = false;
  std::string device_ids;
  std::string output_device;

  bool broadcast_buffers = false;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  std::size_t bucket_cap_bytes = 0;
  bool has_comm_hook = false;
  bool join_uneven_inputs = false;

  /// Of the first pass's layout, in bytes, in the order of their reduction.
  std::vector<std::int64_t> bucket_sizes;
  bool has_rebuilt_buckets = false;
  /// The same of the layout in the order of readiness; empty before it is known.
  std::vector<std::int64_t> rebuilt_bucket_sizes;
  /// For each of its buckets, positions in the list of trainable parameters.
  std::vector<std::vector<std::size_t>> rebuilt_per_bucket_param_indices;

  /// Passes that were reduced to their end.
  std::uint64_t iteration = 0;
  /// Bytes of parameters that this rank did not use in the last of them.
  std::int64_t unused_parameter_size = 0;
  std::size_t num_buckets_reduced = 0;
  StepTimes last;
  /// Over all of them.
  StepTimes average;

  /// Why the group is not usable any more; empty while it is.
  std::string error;
};

std::ostream& operator<<(std::ostream& stream, const LoggingData& data);

}  // namespace ddp
