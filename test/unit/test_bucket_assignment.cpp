#include <test/support/catch2.h>

#include <ATen/ATen.h>

#include <ddp/reducer/bucket_assignment.h>

// The expected layouts are those that c10d's compute_bucket_assignment_by_size gives, reversed as
// Python's DistributedDataParallel reverses them.

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

at::Tensor floats(std::int64_t count) { return at::empty({count}, at::kFloat); }
at::Tensor doubles(std::int64_t count) { return at::empty({count}, at::kDouble); }

using Layout = ddp::BucketAssignment;

}  // namespace

TEST_CASE("without a limit there is one bucket a dtype, the later parameters' first") {
  const std::vector<at::Tensor> tensors{floats(3), doubles(2), floats(4), doubles(1)};
  CHECK(ddp::assign_buckets(tensors, {kNoLimit}) == Layout{{1, 3}, {0, 2}});
}

TEST_CASE("a bucket closes when its size has reached the limit") {
  const std::vector<at::Tensor> tensors{floats(10), floats(10), floats(10), floats(10), floats(10)};
  CHECK(ddp::assign_buckets(tensors, {80}) == Layout{{4}, {2, 3}, {0, 1}});
  CHECK(ddp::assign_buckets(tensors, {81}) == Layout{{3, 4}, {0, 1, 2}});
  CHECK(ddp::assign_buckets(tensors, {1}) == Layout{{4}, {3}, {2}, {1}, {0}});
}

TEST_CASE("each dtype goes through the limits by itself and the last one stays") {
  const std::vector<at::Tensor> tensors{floats(1), doubles(1), floats(1),
                                        floats(1), doubles(1), doubles(1)};
  // Floats: {0}, {2, 3}; doubles: {1}, {4}, {5}, since 8 bytes reach both limits.
  CHECK(ddp::assign_buckets(tensors, {4, 8}) == Layout{{5}, {4}, {2, 3}, {1}, {0}});
}

TEST_CASE("a tensor larger than the limit ends its bucket") {
  const std::vector<at::Tensor> tensors{floats(1), floats(1000), floats(1)};
  CHECK(ddp::assign_buckets(tensors, {100}) == Layout{{2}, {0, 1}});
}

TEST_CASE("an expected sparse gradient has a bucket of its own") {
  const std::vector<at::Tensor> tensors{floats(1), floats(1), floats(1)};
  CHECK(ddp::assign_buckets(tensors, {kNoLimit}, {false, true, false}) == Layout{{1}, {0, 2}});
}

TEST_CASE("a given order is kept, and buckets come in the order in which they become ready") {
  const std::vector<at::Tensor> tensors{floats(1), doubles(1), floats(1), doubles(1), floats(1)};
  CHECK(ddp::assign_buckets(tensors, {4, 8}, {}, {4, 3, 2, 1, 0}) == Layout{{4}, {3}, {1}, {2, 0}});
  // Buckets that were never filled: the one whose last gradient comes earlier is first.
  CHECK(ddp::assign_buckets(tensors, {kNoLimit}, {}, {0, 1, 3, 2, 4}) == Layout{{1, 3}, {0, 2, 4}});
  CHECK(ddp::assign_buckets(tensors, {kNoLimit}, {}, {0, 2, 4, 1, 3}) == Layout{{0, 2, 4}, {1, 3}});
}

TEST_CASE("zero-size tensors are laid out like any other") {
  const std::vector<at::Tensor> tensors{floats(0), floats(2), floats(0)};
  CHECK(ddp::assign_buckets(tensors, {8}) == Layout{{2}, {0, 1}});
  CHECK(ddp::assign_buckets({floats(0)}, {8}) == Layout{{0}});
}
