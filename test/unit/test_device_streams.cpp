#include <test/support/catch2.h>
#include <test/support/fake_device.h>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <ddp/reducer/bucket.h>
#include <ddp/reducer/device_streams.h>

// The parts of stream order that a whole step does not show: who is waited for no more, and what
// the allocator is told.

using namespace ddp::test;
using ddp::detail::DeviceStreams;
using Values = std::vector<float>;

namespace {

at::Tensor made_on(const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  return at::zeros({2}, fake_device());
}

const ddp::detail::MessageAllocator kAllocator = [](std::int64_t numel,
                                                    const at::TensorOptions& options) {
  return at::empty({numel}, options);
};

}  // namespace

TEST_CASE("memory stays with each stream that uses it, also when it is another's than before") {
  enable_fake_device();
  const auto allocating = new_fake_stream();
  const c10::StreamGuard guard(new_fake_stream());
  DeviceStreams streams(fake_device());
  const int before = misuses();
  for (int i = 0; i < 2; ++i) {
    auto memory = made_on(allocating);
    streams.forget();
    streams.use(memory);
    memory.add_(1);
    const auto sum = memory + 1;
    memory.reset();  // the kernels are still to come
    read_fake(sum);
    CHECK(misuses() == before);
  }
}

TEST_CASE("what a pass before used is waited for no more") {
  enable_fake_device();
  const auto memory = made_on(new_fake_stream());
  const auto slow = new_fake_stream();
  DeviceStreams streams(fake_device());
  bool has_run = false;
  {
    const c10::StreamGuard guard(slow);
    streams.use(memory);
  }
  launch_fake_kernel(slow, {}, [&] { has_run = true; });
  streams.begin_pass();
  const c10::StreamGuard guard(new_fake_stream());
  streams.use_after_others(memory);
  read_fake(memory);
  CHECK_FALSE(has_run);
}

TEST_CASE("a bucket's memory stays with who fills it with zeros, and with who takes its result") {
  enable_fake_device();
  const std::vector<ddp::NamedParameter> parameters{
      {"p", at::zeros({2}, fake_device()).set_requires_grad(true)}};
  const auto allocating = new_fake_stream();
  const auto make = [&] {
    const c10::StreamGuard guard(allocating);
    return std::make_unique<ddp::Bucket>(parameters, std::vector<std::size_t>{0}, kAllocator);
  };
  const c10::StreamGuard guard(new_fake_stream());
  const auto own = at::zeros({2}, fake_device());
  const int before = misuses();
  SECTION("zeros, and no step to its end") {
    auto bucket = make();
    bucket->begin_with_zeros(parameters);
  }
  SECTION("a result") {
    auto bucket = make();
    {
      const c10::StreamGuard elsewhere(allocating);
      bucket->begin(parameters, /*keep_gradients=*/true);
      bucket->complete(parameters, 1, {0});
    }
    bucket->finish(parameters, {1});
    own.copy_(bucket->message());
    bucket->drop_gradients(parameters);
  }
  SECTION("memory of its own, as the program has kept the one before") {
    auto bucket = make();
    bucket->begin_with_zeros(parameters);
    const auto kept = bucket->message().detach();
    {
      const c10::StreamGuard elsewhere(allocating);
      bucket->begin_with_zeros(parameters);
    }
    bucket->finish(parameters, {1});
    own.copy_(bucket->message());
    CHECK_FALSE(kept.is_alias_of(bucket->message()));
    bucket->drop_gradients(parameters);
  }
  read_fake(own);
  CHECK(misuses() == before);
}
