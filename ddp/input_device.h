#pragma once

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

// How the wrapper moves a forward's arguments to the module's device, as Python's does with its
// tensors in lists, tuples and dictionaries.

namespace ddp::detail {

/// Whether values of this type have tensors that are found: a tensor, or one of the containers
/// below, in any nesting.
template <class Value>
struct HoldsTensors : std::false_type {};
template <>
struct HoldsTensors<at::Tensor> : std::true_type {};
template <class Value>
struct HoldsTensors<std::optional<Value>> : HoldsTensors<Value> {};
template <class Value>
struct HoldsTensors<std::vector<Value>> : HoldsTensors<Value> {};
template <class Value, std::size_t Size>
struct HoldsTensors<std::array<Value, Size>> : HoldsTensors<Value> {};
template <class Key, class Value>
struct HoldsTensors<std::map<Key, Value>> : HoldsTensors<Value> {};
template <class Key, class Value>
struct HoldsTensors<std::unordered_map<Key, Value>> : HoldsTensors<Value> {};
template <class First, class Second>
struct HoldsTensors<std::pair<First, Second>>
    : std::disjunction<HoldsTensors<First>, HoldsTensors<Second>> {};
template <class... Values>
struct HoldsTensors<std::tuple<Values...>> : std::disjunction<HoldsTensors<Values>...> {};

/// Moves the tensors in `value` to `device`, in place.
template <class Value>
void move_to(Value& value, c10::Device device) {
  if constexpr (!HoldsTensors<Value>::value) {
    return;
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    if (value.defined()) {
      value = value.to(device, /*non_blocking=*/true);
    }
  } else if constexpr (requires { value.has_value(); }) {
    if (value) {
      move_to(*value, device);
    }
  } else if constexpr (requires { typename Value::mapped_type; }) {
    for (auto& entry : value) {
      move_to(entry.second, device);
    }
  } else if constexpr (requires { value.begin(); }) {
    for (auto& entry : value) {
      move_to(entry, device);
    }
  } else {
    std::apply([&](auto&... entries) { (move_to(entries, device), ...); }, value);
  }
}

/// An argument of forward, of type `Argument&&`: a copy on the device where it holds tensors, the
/// argument itself otherwise.
template <class Argument>
class OnDevice {
 public:
  OnDevice(Argument&& argument, c10::Device device) : value_(std::forward<Argument>(argument)) {
    if constexpr (kIsCopied) {
      move_to(value_, device);
    }
  }
  /// Of the same value category as the argument.
  Argument&& get() { return static_cast<Argument&&>(value_); }

 private:
  using Plain = std::remove_cv_t<std::remove_reference_t<Argument>>;
  static constexpr bool kIsCopied = HoldsTensors<Plain>::value;
  std::conditional_t<kIsCopied, Plain, Argument&&> value_;
};

}  // namespace ddp::detail
