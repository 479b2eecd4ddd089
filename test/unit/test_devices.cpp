#include <map>
#include <optional>
#include <test/support/catch2.h>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <ddp/error.h>
#include <ddp/input_place.h>
#include <ddp/module_devices.h>

// Where a module may be, and how its inputs get there. The device "meta" stands for one that is not
// the CPU.

using ddp::detail::AtPlace;
using ddp::detail::find_input_device;
using ddp::detail::InputPlace;

namespace {

const c10::Device kMeta(c10::kMeta);
const InputPlace at_meta{kMeta, {}};

std::vector<ddp::NamedParameter> on(std::vector<c10::Device> devices) {
  std::vector<ddp::NamedParameter> parameters;
  for (const auto device : devices) {
    parameters.push_back({"p" + std::to_string(parameters.size()), at::empty({2}, device)});
  }
  return parameters;
}

}  // namespace

TEST_CASE("inputs are moved to the one device that is given, and only if the module is there") {
  CHECK_FALSE(find_input_device(on({c10::kCPU}), {}, {}, ""));
  CHECK_FALSE(find_input_device(on({kMeta, kMeta}), {}, {}, ""));
  CHECK(find_input_device(on({kMeta, kMeta}), {kMeta}, kMeta, "") == kMeta);
  CHECK_FALSE(find_input_device(on({kMeta}), {}, kMeta, ""));
  REQUIRE_THROWS_WITH(
      find_input_device(on({c10::kCPU, kMeta}), {}, {}, "rank 1 of 2: "),
      contains("rank 1 of 2: the parameter p0 is on cpu and p1 on meta: move the whole module to "
               "one kind of device before wrapping it"));
  REQUIRE_THROWS_WITH(find_input_device(on({kMeta}), {kMeta, kMeta}, {}, ""),
                      contains("device_ids has 2 devices; a process trains on one"));
  REQUIRE_THROWS_WITH(find_input_device(on({c10::kCPU}), {c10::kCPU}, {}, ""),
                      contains("device_ids and output_device are for a module on a single device "
                               "that is not the CPU; this one is on the CPU"));
  REQUIRE_THROWS_WITH(find_input_device(on({c10::kCPU}), {}, kMeta, ""),
                      contains("on the CPU. Leave them out, or move the module"));
  REQUIRE_THROWS_WITH(
      find_input_device(on({kMeta}), {c10::Device("cuda:1")}, {}, ""),
      contains("device_ids is {cuda:1}, but the module is on meta: move it before wrapping"));
}

TEST_CASE("an argument's tensors are moved in any nesting; everything else is passed on as it is") {
  const auto x = at::ones({2});
  CHECK(AtPlace<const at::Tensor&>(x, at_meta).get().device() == kMeta);
  CHECK(x.device() == c10::kCPU);
  CHECK_FALSE(AtPlace<at::Tensor>(at::Tensor(), at_meta).get().defined());

  using Nested = std::tuple<int, std::vector<std::pair<int, at::Tensor>>,
                            std::map<std::string, std::optional<at::Tensor>>>;
  Nested nested{7, {{1, x}, {2, x}}, {{"a", x}, {"b", std::nullopt}}};
  AtPlace<Nested&> moved(nested, at_meta);
  CHECK(std::get<0>(moved.get()) == 7);
  CHECK(std::get<1>(moved.get())[1].second.device() == kMeta);
  CHECK(std::get<2>(moved.get()).at("a")->device() == kMeta);
  CHECK_FALSE(std::get<2>(moved.get()).at("b"));
  CHECK(std::get<1>(nested)[1].second.device() == c10::kCPU);

  // Cast where they are floating.
  const InputPlace in_half{{}, c10::kHalf};
  CHECK(AtPlace<const at::Tensor&>(x, in_half).get().scalar_type() == c10::kHalf);
  CHECK(AtPlace<at::Tensor>(at::ones({2}, at::kLong), in_half).get().scalar_type() == at::kLong);

  // Not even copied.
  auto number = std::make_unique<int>(3);
  CHECK(&AtPlace<std::unique_ptr<int>&>(number, at_meta).get() == &number);
  const auto taken = AtPlace<std::unique_ptr<int>>(std::move(number), at_meta).get().release();
  CHECK(*taken == 3);
  delete taken;
  std::array<at::Tensor, 2> pair{x, x};
  CHECK((AtPlace<std::array<at::Tensor, 2>>(std::move(pair), at_meta).get()[1].device() == kMeta));
}
