#include <test/support/catch2.h>

#include <ATen/ATen.h>

#include <ddp/reducer/scaled_copy.h>

using ddp::detail::scaled_copy;

namespace {

at::Tensor product(const at::Tensor& source, double factor) {
  auto target = at::empty_like(source);
  at::mul_out(target, source, at::scalar_tensor(factor, at::kDouble));
  return target;
}

}  // namespace

TEST_CASE("a scaled copy has the bits of LibTorch's multiplication") {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const std::int64_t numel : {0, 1, 7, 64, 1000, 8192}) {
      for (const double factor : {0.5, 1.0 / 3, 1.0 / 7, 1e-300}) {
        const auto source = at::randn({numel}, dtype) * 1e3;
        const auto target = at::zeros_like(source);
        const auto version = target._version();
        REQUIRE(scaled_copy(target, source, factor));
        CHECK(at::equal(target, product(source, factor)));
        CHECK(target._version() == version + 1);
      }
    }
  }
  const auto special = at::tensor({std::numeric_limits<float>::infinity(), -0.0F, 1e-40F});
  const auto target = at::zeros_like(special);
  REQUIRE(scaled_copy(target, special, 1.0 / 3));
  CHECK(at::equal(target, product(special, 1.0 / 3)));
}

TEST_CASE("a scaled copy in place, and of other layouts without gaps") {
  const auto values = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto target = at::zeros_like(values);
  REQUIRE(target.is_contiguous(at::MemoryFormat::ChannelsLast));
  REQUIRE(scaled_copy(target, values, 0.3));
  CHECK(at::equal(target, product(values, 0.3)));
  const auto expected = product(values, 0.3);
  REQUIRE(scaled_copy(values, values, 0.3));
  CHECK(at::equal(values, expected));
}

TEST_CASE("what a scaled copy leaves to LibTorch stays as it is") {
  const auto target = at::ones({4, 4});
  const auto untouched = [&](const at::Tensor& to, const at::Tensor& from) {
    const auto before = to.clone();
    CHECK_FALSE(scaled_copy(to, from, 0.5));
    CHECK(at::equal(to, before));
  };
  untouched(target, at::ones({4, 4}, at::kDouble));
  untouched(at::ones({4}, at::kHalf), at::ones({4}, at::kHalf));
  untouched(target, at::ones({16}));
  untouched(target, at::ones({4, 4}).t());
  untouched(at::ones({8, 4}).slice(1, 0, 2), at::ones({8, 4}).slice(1, 0, 2));
  untouched(target, at::ones({4, 1}).expand({4, 4}));
  untouched(target, at::_neg_view(at::ones({4, 4})));
  untouched(target, at::ones({4, 4}).to_sparse());
  untouched(at::ones({20000}), at::ones({20000}));
  const auto both = at::ones({20});
  untouched(both.slice(0, 0, 16), both.slice(0, 4, 20));
}
