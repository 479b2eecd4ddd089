#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <test/support/fake_device.h>

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace ddp::test {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Block {
  std::unique_ptr<std::byte[]> bytes;  // kept for good: a late kernel may still come
  std::size_t size = 0;
  std::size_t stream = 0;
  std::vector<std::size_t> recorded;

  void spoil() {
    auto* values = reinterpret_cast<float*>(bytes.get());
    std::fill(values, values + size / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  }
};

/// A place in a stream's queue.
struct Place {
  std::size_t stream = 0;
  std::size_t position = 0;
};

struct Entry {
  std::function<void()> kernel;
  std::vector<Block*> blocks;
  std::optional<Place> awaited;
  std::vector<Block*> spoiled;
};

struct Queue {
  std::deque<Entry> entries;
  std::size_t done = 0;
};

class Machine {
 public:
  static Machine& instance() {
    static auto* machine = new Machine;
    return *machine;
  }

  std::size_t new_stream() {
    const std::lock_guard lock(mutex_);
    queues_.emplace_back();
    return queues_.size() - 1;
  }

  void put(std::size_t stream, Entry entry) {
    const std::lock_guard lock(mutex_);
    queues_[stream].entries.push_back(std::move(entry));
  }

  Place end_of(std::size_t stream) {
    const std::lock_guard lock(mutex_);
    return {stream, queues_[stream].entries.size()};
  }

  void run(const Place& place) {
    const std::lock_guard lock(mutex_);
    auto& queue = queues_[place.stream];
    while (queue.done < place.position) {
      if (queue.entries[queue.done].awaited) {
        run_awaited(queue, place.position);
        continue;
      }
      auto& entry = queue.entries[queue.done++];
      for (auto* block : entry.spoiled) {
        block->spoil();
        ++misuses;
      }
      if (entry.kernel) {
        entry.kernel();
      }
    }
  }

  Block* allocate(std::size_t size, std::size_t stream) {
    const std::lock_guard lock(mutex_);
    auto block = std::make_unique<Block>();
    block->bytes = std::make_unique<std::byte[]>(std::max<std::size_t>(size, 1));
    block->size = size;
    block->stream = stream;
    block->spoil();
    auto* const result = block.get();
    blocks_.emplace(result->bytes.get(), std::move(block));
    return result;
  }

  Block* block_at(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<const std::byte*>(data));
    return found == blocks_.end() ? nullptr : found->second.get();
  }

  /// The allocating stream takes the memory for something else, after the streams that it was
  /// told of.
  void free(Block* block) {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> before(queues_.size(), 0);
    auto streams = block->recorded;
    streams.push_back(block->stream);
    for (const auto stream : streams) {
      reach({stream, queues_[stream].entries.size()}, before);
    }
    for (std::size_t stream = 0; stream < queues_.size(); ++stream) {
      auto& queue = queues_[stream];
      for (auto i = std::max(queue.done, before[stream]); i < queue.entries.size(); ++i) {
        const auto& used = queue.entries[i].blocks;
        if (std::find(used.begin(), used.end(), block) != used.end()) {
          queue.entries[i].spoiled.push_back(block);
        }
      }
    }
  }

  std::atomic<int> host_waits{0};
  std::atomic<int> misuses{0};

 private:
  Machine() { queues_.emplace_back(); }

  /// What the next entries wait for, up to the first kernel or `end`: the last one's first, as
  /// nothing orders them among themselves.
  void run_awaited(Queue& queue, std::size_t end) {
    const auto first = queue.done;
    auto last = first;
    while (last < end && queue.entries[last].awaited) {
      ++last;
    }
    for (auto i = last; i-- > first;) {
      run(*queue.entries[i].awaited);
    }
    queue.done = std::max(queue.done, last);
  }

  void reach(const Place& place, std::vector<std::size_t>& before) {
    for (auto i = before[place.stream]; i < place.position; ++i) {
      before[place.stream] = i + 1;
      if (const auto& awaited = queues_[place.stream].entries[i].awaited) {
        reach(*awaited, before);
      }
    }
  }

  std::recursive_mutex mutex_;
  std::deque<Queue> queues_;
  std::map<const std::byte*, std::unique_ptr<Block>> blocks_;
};

thread_local std::size_t current_stream = 0;

c10::Stream stream_of(std::size_t id) {
  return c10::Stream(c10::Stream::UNSAFE, fake_device(), static_cast<c10::StreamId>(id));
}

std::size_t id_of(const c10::Stream& stream) { return static_cast<std::size_t>(stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return fake_device(); }
  c10::Device getDevice() const override { return fake_device(); }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return new_fake_stream();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/,
                                      bool /*isHighPriority*/) const override {
    return new_fake_stream();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, id_of(stream)));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    destroyEvent(*event, 0);
    *event = new Place(Machine::instance().end_of(id_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Entry entry;
    entry.awaited = *static_cast<Place*>(event);
    Machine::instance().put(id_of(stream), std::move(entry));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Place*>(event);
  }
  bool queryEvent(void* /*event*/) const override { return false; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return false; }
  void synchronizeEvent(void* event) const override {
    ++Machine::instance().host_waits;
    Machine::instance().run(*static_cast<Place*>(event));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++Machine::instance().host_waits;
    Machine::instance().run(Machine::instance().end_of(id_of(stream)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (auto* const block = Machine::instance().block_at(data.get())) {
      block->recorded.push_back(id_of(stream));
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    auto* const block = Machine::instance().allocate(size, current_stream);
    return {block->bytes.get(), block, &release, fake_device()};
  }
  static void release(void* block) { Machine::instance().free(static_cast<Block*>(block)); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*size*/) const override {
    TORCH_CHECK(false, "not on this device");
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

at::Tensor make(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  static auto* const allocator = new Allocator;
  std::size_t numel = sizes.empty() ? 1 : 0;
  if (std::find(sizes.begin(), sizes.end(), 0) == sizes.end()) {
    numel = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      numel += static_cast<std::size_t>((sizes[i] - 1) * strides[i]);
    }
  }
  const auto bytes = numel * c10::elementSize(dtype);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       allocator->allocate(bytes), allocator,
                                                       /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/) {
  return make(sizes, strides, dtype.value_or(at::kFloat));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> /*format*/) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  return make(sizes, strides, dtype.value_or(at::kFloat));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  const auto stream = stream_of(current_stream);
  if (to.is_cpu()) {
    ++Machine::instance().host_waits;
    Machine::instance().run(Machine::instance().end_of(current_stream));
    to.copy_(memory_of(from));
  } else {
    const auto source = from.is_cpu() ? from.clone() : memory_of(from);
    launch_fake_kernel(stream, {from, to},
                       [source, target = memory_of(to)] { target.copy_(source); });
  }
  return to;
}

using Values = std::vector<c10::IValue>;

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

c10::IValue on_cpu(const c10::IValue& value, std::vector<at::Tensor>& used) {
  const auto one = [&](const at::Tensor& tensor) {
    if (!is_on_device(tensor)) {
      return tensor;
    }
    used.push_back(tensor);
    return memory_of(tensor);
  };
  if (value.isTensor()) {
    return one(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) {
      tensors.push_back(one(tensor));
    }
    return tensors;
  }
  if (value.isDevice()) {
    return c10::Device(c10::kCPU);
  }
  return value;
}

Values call(const c10::OperatorHandle& op, const Values& arguments) {
  const at::AutoDispatchBelowAutograd below;
  const at::NoGradGuard no_grad;
  torch::jit::Stack stack(arguments);
  op.callBoxed(stack);
  return stack;
}

/// Any other operation: the CPU's, when its turn comes. What makes new tensors is done at once as
/// well, on what the memory holds by now, to learn their shapes.
void late(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const Values arguments(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()),
                         stack->end());
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end());
  std::vector<at::Tensor> used;
  Values late_arguments;
  for (const auto& argument : arguments) {
    late_arguments.push_back(on_cpu(argument, used));
  }
  if (schema.is_mutable()) {
    launch_fake_kernel(stream_of(current_stream), used,
                       [op, late_arguments] { call(op, late_arguments); });
    for (std::size_t i = 0; i < schema.returns().size(); ++i) {
      for (std::size_t j = 0; j < arguments.size(); ++j) {
        if (schema.may_alias({c10::SchemaArgType::input, j}, {c10::SchemaArgType::output, i})) {
          stack->push_back(arguments[j]);
          break;
        }
      }
    }
    return;
  }
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> targets;
  for (const auto& shape : call(op, late_arguments)) {
    const auto& like = shape.toTensor();
    results.push_back(make(like.sizes(), like.strides(), like.scalar_type()));
    targets.push_back(memory_of(results.back()));
    used.push_back(results.back());
    stack->emplace_back(results.back());
  }
  launch_fake_kernel(stream_of(current_stream), used, [op, late_arguments, targets] {
    const auto values = call(op, late_arguments);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      targets[i].copy_(values[i].toTensor());
    }
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&late>());
}

}  // namespace

void enable_fake_device() {
  static const bool done = [] {
    c10::register_privateuse1_backend("late");
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)done;
}

c10::Device fake_device() { return {kType, 0}; }

c10::Stream new_fake_stream() { return stream_of(Machine::instance().new_stream()); }

void launch_fake_kernel(const c10::Stream& stream, const std::vector<at::Tensor>& used,
                        std::function<void()> kernel) {
  Entry entry;
  entry.kernel = std::move(kernel);
  for (const auto& tensor : used) {
    if (is_on_device(tensor)) {
      entry.blocks.push_back(Machine::instance().block_at(tensor.storage().data()));
    }
  }
  Machine::instance().put(id_of(stream), std::move(entry));
}

at::Tensor memory_of(const at::Tensor& tensor) {
  auto* const bytes = static_cast<std::byte*>(tensor.storage().mutable_data()) +
                      tensor.storage_offset() * tensor.element_size();
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

void order_streams(const c10::Stream& stream, const c10::Stream& waiter) {
  Entry entry;
  entry.awaited = Machine::instance().end_of(id_of(stream));
  Machine::instance().put(id_of(waiter), std::move(entry));
}

std::vector<float> read_fake(const at::Tensor& tensor) {
  Machine::instance().run(Machine::instance().end_of(current_stream));
  const auto values = memory_of(tensor).to(at::kFloat).contiguous();
  return {values.data_ptr<float>(), values.data_ptr<float>() + values.numel()};
}

int host_waits() { return Machine::instance().host_waits; }

int misuses() { return Machine::instance().misuses; }

}  // namespace ddp::test
