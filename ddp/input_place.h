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
#include <c10/core/ScalarType.h>

// How the wrapper moves a forward's arguments to the module's device and casts them to the dtype it
// computes in, as Python's does with its tensors in lists, tuples and dictionaries.

namespace ddp::detail {

/// What a forward's tensors are brought to; the dtype only floating ones.
struct InputPlace {
  std::optional<c10::Device> device;
  std::optional<c10::ScalarType> dtype;
  explicit operator bool() const { return device || dtype; }
};

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

/// Brings the tensors in `value` to `place`, in place.
template <class Value>
void move_to(Value& value, const InputPlace& place) {
  if constexpr (!HoldsTensors<Value>::value) {
    return;
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    if (value.defined()) {
      const bool is_cast = place.dtype && value.is_floating_point();
      // The program may fill its pinned memory anew at once; pageable memory is read in the call.
      const bool non_blocking = !value.is_cpu() || !value.is_pinned();
      value = value.to(place.device.value_or(value.device()),
                       is_cast ? *place.dtype : value.scalar_type(), non_blocking);
    }
  } else if constexpr (requires { value.has_value(); }) {
    if (value) {
      move_to(*value, place);
    }
  } else if constexpr (requires { typename Value::mapped_type; }) {
    for (auto& entry : value) {
      move_to(entry.second, place);
    }
  } else if constexpr (requires { value.begin(); }) {
    for (auto& entry : value) {
      move_to(entry, place);
    }
  } else {
    std::apply([&](auto&... entries) { (move_to(entries, place), ...); }, value);
  }
}

/// An argument of forward, of type `Argument&&`: a copy at the place where it holds tensors, the
/// argument itself otherwise.
template <class Argument>
class AtPlace {
 public:
  AtPlace(Argument&& argument, const InputPlace& place) : value_(std::forward<Argument>(argument)) {
    if constexpr (kIsCopied) {
      move_to(value_, place);
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
