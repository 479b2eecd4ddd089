#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include <ddp/reducer/bucket_assignment.h>

namespace ddp {
namespace {

using Key = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;

struct OpenBucket {
  std::vector<std::size_t> indices;
  std::size_t bytes = 0;
  std::size_t limit = 0;  // position in `limits`
};

}  // namespace

BucketAssignment assign_buckets(const std::vector<at::Tensor>& tensors,
                                const std::vector<std::size_t>& limits,
                                const std::vector<bool>& expect_sparse,
                                const std::vector<std::size_t>& order) {
  std::vector<std::size_t> sequence = order;
  if (sequence.empty()) {
    sequence.resize(tensors.size());
    std::iota(sequence.begin(), sequence.end(), 0);
  }
  std::vector<std::size_t> position(tensors.size(), 0);
  BucketAssignment buckets;
  std::map<Key, OpenBucket> open;
  for (std::size_t i = 0; i < sequence.size(); ++i) {
    const auto index = sequence[i];
    position[index] = i;
    if (!expect_sparse.empty() && expect_sparse[index]) {
      buckets.push_back({index});
      continue;
    }
    const auto& tensor = tensors[index];
    auto& bucket = open[{tensor.scalar_type(), tensor.device().type(), tensor.device().index()}];
    bucket.indices.push_back(index);
    bucket.bytes += static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    if (bucket.bytes >= limits[bucket.limit]) {
      buckets.push_back(std::move(bucket.indices));
      bucket.indices.clear();
      bucket.bytes = 0;
      bucket.limit = std::min(bucket.limit + 1, limits.size() - 1);
    }
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.indices.empty()) {
      buckets.push_back(std::move(bucket.indices));
    }
  }
  if (order.empty()) {
    std::sort(buckets.begin(), buckets.end(), [](const auto& left, const auto& right) {
      return *std::min_element(left.begin(), left.end()) >
             *std::min_element(right.begin(), right.end());
    });
  } else {
    std::sort(buckets.begin(), buckets.end(), [&](const auto& left, const auto& right) {
      return position[left.back()] < position[right.back()];
    });
  }
  return buckets;
}

}  // namespace ddp
