#include <stdexcept>
#include <test/support/catch2.h>
#include <test/support/fake_process_group.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ddp/reducer/bucket.h>
#include <ddp/reducer/message_memory.h>

// Where a bucket's storage comes from.

namespace {

/// A backend that has `room` elements to give.
class Lender : public c10d::Backend {
 public:
  explicit Lender(std::int64_t elements) : Backend(0, 1), room(elements) {}

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return room > 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (size > room) {
      throw std::runtime_error("full");
    }
    room -= size;
    lent = at::zeros({size}, options);
    return lent;
  }

  std::int64_t room;
  at::Tensor lent;
};

c10::intrusive_ptr<c10d::ProcessGroup> group_with(const c10::intrusive_ptr<Lender>& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 1);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace

TEST_CASE("a bucket lies in the backend's memory, where that has some") {
  const auto backend = c10::make_intrusive<Lender>(16);
  const auto allocator = ddp::detail::message_allocator(group_with(backend));
  const std::vector<ddp::NamedParameter> parameters{{"w", at::ones({2, 3}), false}};
  const ddp::Bucket bucket(parameters, {0}, allocator);
  CHECK(bucket.message().numel() == 6);
  CHECK(bucket.message().is_alias_of(backend->lent));
  CHECK(backend->room == 10);
}

TEST_CASE("what the backend cannot give is LibTorch's memory") {
  const auto small = c10::make_intrusive<Lender>(4);
  const auto full = ddp::detail::message_allocator(group_with(small))(5, at::kDouble);
  CHECK(full.numel() == 5);
  CHECK(full.scalar_type() == at::kDouble);
  CHECK(small->room == 4);
  const auto none = c10::make_intrusive<Lender>(0);
  CHECK(ddp::detail::message_allocator(group_with(none))(5, at::kFloat).numel() == 5);
  // A group without a backend of c10d's kind.
  const auto fake = c10::make_intrusive<ddp::test::FakeProcessGroup>(1);
  CHECK(ddp::detail::message_allocator(fake)(5, at::kFloat).numel() == 5);
}
