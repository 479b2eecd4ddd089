#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// For each bucket, the indices of its parameters.
using BucketAssignment = std::vector<std::vector<std::size_t>>;

/// Lays `tensors` out in buckets, as c10d's `compute_bucket_assignment_by_size` does: tensors of
/// one dtype and device go into one bucket, in the order of `order`, until its size has reached the
/// limit (so a bucket may be larger than its limit, and a huge tensor ends its bucket). Each
/// (dtype, device) goes through `limits` (bytes) by itself; the last limit stays for the rest.
/// Tensors for which `expect_sparse` (empty, or one flag a tensor) is set get a bucket of their
/// own.
///
/// `order` empty: the tensors' own order, and the buckets sorted by their smallest index, reversed,
/// since gradients come in about the reverse of the order of registration: c10d's layout of the
/// first pass. Otherwise the buckets are sorted by when their last tensor comes in `order`, which
/// (unlike c10d's, which leaves this to a hash map) is deterministic.
///
/// Pure; thread-safe.
BucketAssignment assign_buckets(const std::vector<at::Tensor>& tensors,
                                const std::vector<std::size_t>& limits,
                                const std::vector<bool>& expect_sparse = {},
                                const std::vector<std::size_t>& order = {});

}  // namespace ddp
