#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/object_collectives.h>

namespace ddp {
namespace {

// The first byte of a packed object says what it is.
constexpr char kString = 's';
constexpr char kValue = 'v';

std::string pack(const std::string& object) { return kString + object; }

std::string pack(const c10::IValue& object) {
  try {
    const auto data = torch::jit::pickle_save(object);
    return kValue + std::string(data.begin(), data.end());
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("this object ({}) cannot be sent: {}", object.tagKind(),
                                 detail::concise(error)));
  }
}

void check_kind(const std::string& packed, char kind) {
  if (packed.empty() || packed[0] != kind) {
    throw UsageError(
        "a rank sent a std::string where another expected an IValue, or the reverse: all ranks "
        "must use the same");
  }
}

void unpack(const std::string& packed, std::string* object) {
  check_kind(packed, kString);
  *object = packed.substr(1);
}

void unpack(const std::string& packed, c10::IValue* object) {
  check_kind(packed, kValue);
  *object = torch::jit::pickle_load({packed.begin() + 1, packed.end()});
}

template <class Object>
Object unpacked(const std::string& packed) {
  Object object;
  unpack(packed, &object);
  return object;
}

template <class Object>
std::vector<Object> all_unpacked(const std::vector<std::string>& packed) {
  std::vector<Object> objects;
  for (const auto& one : packed) {
    objects.push_back(unpacked<Object>(one));
  }
  return objects;
}

void refuse_async(bool async_op, const char* name) {
  if (async_op) {
    throw UsageError(
        fmt::format("{}: async_op is not for objects: their size must be known first", name));
  }
}

at::Tensor to_tensor(const std::string& packed, std::int64_t size) {
  auto tensor = at::zeros({size}, at::kByte);
  std::memcpy(tensor.data_ptr(), packed.data(), packed.size());
  return tensor;
}

std::string to_packed(const at::Tensor& tensor, std::int64_t size) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<std::size_t>(size)};
}

at::Tensor number(std::int64_t value) { return at::full({1}, value, at::kLong); }

/// The ranks' sizes, and the largest.
struct Sizes {
  std::vector<std::int64_t> each;
  std::int64_t largest = 0;
};

Sizes gather_sizes(std::int64_t size, const ProcessGroup& group) {
  auto sizes = at::empty({get_world_size(group)}, at::kLong);
  all_gather_into_tensor(sizes, number(size), {}, group);
  const auto* data = sizes.data_ptr<std::int64_t>();
  Sizes result{{data, data + sizes.numel()}, 0};
  result.largest = *std::max_element(result.each.begin(), result.each.end());
  return result;
}

std::string broadcast_packed(const std::string& packed, const BroadcastOptions& options,
                             const ProcessGroup& group) {
  refuse_async(options.async_op(), "broadcast_object");
  const bool source = get_rank(group) == options.src();
  const auto size = number(source ? static_cast<std::int64_t>(packed.size()) : 0);
  broadcast(size, options.src(), group);
  const auto bytes = size.item<std::int64_t>();
  const auto data = source ? to_tensor(packed, bytes) : at::empty({bytes}, at::kByte);
  broadcast(data, options.src(), group);
  return to_packed(data, bytes);
}

std::vector<std::string> all_gather_packed(const std::string& packed, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_gather_object");
  const auto sizes = gather_sizes(static_cast<std::int64_t>(packed.size()), group);
  const auto all = at::empty({call.size(), sizes.largest}, at::kByte);
  all_gather_into_tensor(all, to_tensor(packed, sizes.largest), {}, group);
  std::vector<std::string> result;
  for (std::size_t rank = 0; rank < sizes.each.size(); ++rank) {
    result.push_back(to_packed(all[static_cast<std::int64_t>(rank)], sizes.each[rank]));
  }
  return result;
}

std::vector<std::string> gather_packed(const std::string& packed, const GatherOptions& options,
                                       const ProcessGroup& group) {
  refuse_async(options.async_op(), "gather_object");
  detail::CollectiveCall(group, "gather_object").check_rank(options.dst(), "dst");
  const auto sizes = gather_sizes(static_cast<std::int64_t>(packed.size()), group);
  std::vector<at::Tensor> all;
  if (get_rank(group) == options.dst()) {
    for (std::size_t rank = 0; rank < sizes.each.size(); ++rank) {
      all.push_back(at::empty({sizes.largest}, at::kByte));
    }
  }
  gather(to_tensor(packed, sizes.largest), all, options, group);
  std::vector<std::string> result;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    result.push_back(to_packed(all[rank], sizes.each[rank]));
  }
  return result;
}

template <class Object>
Object scatter_packed(const std::vector<Object>& objects, const ScatterOptions& options,
                      const ProcessGroup& group) {
  refuse_async(options.async_op(), "scatter_object");
  const detail::CollectiveCall call(group, "scatter_object");
  call.check_rank(options.src(), "src");
  const bool source = call.rank() == options.src();
  if (objects.size() != (source ? static_cast<std::size_t>(call.size()) : 0)) {
    call.refuse(fmt::format(
        "objects has {} entries; expected one for each of the {} ranks on src ({}), and none "
        "elsewhere",
        objects.size(), call.size(), options.src()));
  }
  auto sizes = at::zeros({call.size()}, at::kLong);
  std::vector<std::string> packed;
  for (std::size_t rank = 0; rank < objects.size(); ++rank) {
    packed.push_back(pack(objects[rank]));
    sizes[static_cast<std::int64_t>(rank)] = static_cast<std::int64_t>(packed.back().size());
  }
  broadcast(sizes, options.src(), group);
  const auto largest = sizes.max().template item<std::int64_t>();
  std::vector<at::Tensor> inputs;
  for (const auto& one : packed) {
    inputs.push_back(to_tensor(one, largest));
  }
  const auto output = at::empty({largest}, at::kByte);
  scatter(output, inputs, options.src(), group);
  return unpacked<Object>(to_packed(output, sizes[call.rank()].template item<std::int64_t>()));
}

}  // namespace

std::string broadcast_object(const std::string& object, const BroadcastOptions& options,
                             const ProcessGroup& group) {
  return unpacked<std::string>(broadcast_packed(pack(object), options, group));
}

c10::IValue broadcast_object(const c10::IValue& object, const BroadcastOptions& options,
                             const ProcessGroup& group) {
  return unpacked<c10::IValue>(broadcast_packed(pack(object), options, group));
}

std::vector<std::string> all_gather_object(const std::string& object, const ProcessGroup& group) {
  return all_unpacked<std::string>(all_gather_packed(pack(object), group));
}

std::vector<c10::IValue> all_gather_object(const c10::IValue& object, const ProcessGroup& group) {
  return all_unpacked<c10::IValue>(all_gather_packed(pack(object), group));
}

std::vector<std::string> gather_object(const std::string& object, const GatherOptions& options,
                                       const ProcessGroup& group) {
  return all_unpacked<std::string>(gather_packed(pack(object), options, group));
}

std::vector<c10::IValue> gather_object(const c10::IValue& object, const GatherOptions& options,
                                       const ProcessGroup& group) {
  return all_unpacked<c10::IValue>(gather_packed(pack(object), options, group));
}

std::string scatter_object(const std::vector<std::string>& objects, const ScatterOptions& options,
                           const ProcessGroup& group) {
  return scatter_packed(objects, options, group);
}

c10::IValue scatter_object(const std::vector<c10::IValue>& objects, const ScatterOptions& options,
                           const ProcessGroup& group) {
  return scatter_packed(objects, options, group);
}

}  // namespace ddp
