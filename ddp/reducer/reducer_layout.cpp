#include <algorithm>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/reducer/reducer.h>
#include <ddp/reducer/watched_wait.h>

// The reducer's buckets, and how the ranks agree on them.

namespace ddp {
namespace {

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) {
    tensors.push_back(parameter.tensor);
  }
  return tensors;
}

std::vector<bool> expects_sparse(const std::vector<NamedParameter>& parameters) {
  std::vector<bool> flags;
  for (const auto& parameter : parameters) {
    flags.push_back(parameter.expects_sparse);
  }
  return flags;
}

}  // namespace

BucketAssignment Reducer::first_assignment() const {
  // As c10d: one bucket a dtype and device until the order of readiness is known; with unused
  // parameters it is never known for sure, and the size limits hold from the start.
  constexpr auto kNoLimit = std::numeric_limits<std::size_t>::max();
  const auto limits = finds_unused() ? std::vector{options_.first_bucket_cap, options_.bucket_cap}
                                     : std::vector{kNoLimit};
  return assign_buckets(tensors_of(parameters_), limits, expects_sparse(parameters_));
}

void Reducer::set_buckets(BucketAssignment assignment) {
  buckets_.clear();
  bucket_of_.assign(parameters_.size(), 0);
  position_of_.assign(parameters_.size(), 0);
  for (auto& indices : assignment) {
    for (std::size_t position = 0; position < indices.size(); ++position) {
      bucket_of_[indices[position]] = buckets_.size();
      position_of_[indices[position]] = position;
    }
    auto& bucket = buckets_.emplace_back(parameters_, std::move(indices), message_allocator_);
    const auto device = bucket.message().device();
    bucket.wait_kind = detail::wait_kind(*process_group_, device);
    bucket.averages_natively =
        !bucket.is_sparse() &&
        detail::averages_natively(*process_group_, device, bucket.message().scalar_type());
  }
  in_flight_.assign(buckets_.size(), {});
}

BucketAssignment Reducer::bucket_assignment() const {
  const std::lock_guard lock(mutex_);
  BucketAssignment assignment;
  for (const auto& bucket : buckets_) {
    assignment.push_back(bucket.indices());
  }
  return assignment;
}

bool Reducer::has_rebuilt_buckets() const {
  const std::lock_guard lock(mutex_);
  return rebuilt_;
}

void Reducer::rebuild_buckets() {
  const auto own =
      assign_buckets(tensors_of(parameters_), {options_.first_bucket_cap, options_.bucket_cap},
                     expects_sparse(parameters_), arrival_);
  try {
    set_buckets(agree_with_rank_0(own));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    communication_failed("agreeing on the layout of the buckets", detail::concise(error));
  }
  rebuilt_ = true;
  arrival_.clear();
}

BucketAssignment Reducer::agree_with_rank_0(const BucketAssignment& own) {
  // c10d's protocol (reducer.cpp, sync_bucket_indices): all indices and the number of buckets in
  // one int32 tensor, whose size is the same on all ranks; then the buckets' sizes.
  const auto device = parameters_.front().tensor.device();
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> sizes;
  for (const auto& bucket : own) {
    indices.insert(indices.end(), bucket.begin(), bucket.end());
    sizes.push_back(static_cast<std::int32_t>(bucket.size()));
  }
  indices.push_back(static_cast<std::int32_t>(own.size()));
  const auto from_rank_0 = [&](const std::vector<std::int32_t>& values) {
    std::vector<at::Tensor> tensors{at::tensor(values, at::kInt).to(device)};
    detail::watched_wait(*process_group_->broadcast(tensors), channel_.get(),
                         detail::wait_kind(*process_group_, device));
    const auto host = tensors.front().cpu();
    return std::vector<std::int32_t>(host.data_ptr<std::int32_t>(),
                                     host.data_ptr<std::int32_t>() + host.numel());
  };
  indices = from_rank_0(indices);
  const auto count = indices.back();
  const auto is_size = [](std::int32_t size) { return size > 0; };
  const auto is_index = [&](std::int32_t index) {
    return index >= 0 && static_cast<std::size_t>(index) < parameters_.size();
  };
  bool is_layout = count > 0 && static_cast<std::size_t>(count) < indices.size() &&
                   std::all_of(indices.begin(), indices.end() - 1, is_index);
  if (is_layout) {
    sizes.resize(count, 0);
    sizes = from_rank_0(sizes);
    is_layout = std::all_of(sizes.begin(), sizes.end(), is_size) &&
                std::accumulate(sizes.begin(), sizes.end(), std::size_t{1}) == indices.size();
  }
  if (!is_layout) {  // a broadcast that failed on the device leaves anything there
    communication_failed("the broadcast of rank 0's layout of the buckets",
                         "what came is not a layout: a rank was lost, or has another model");
  }
  BucketAssignment agreed;
  auto next = indices.begin();
  for (const auto size : sizes) {
    agreed.emplace_back(next, next + size);
    next += size;
  }
  return agreed;
}

}  // namespace ddp
