#include <cstdlib>
#include <cstring>
#include <exception>

#include <ATen/ATen.h>

#include <ddp/reducer/message_memory.h>

namespace ddp::detail {
namespace {

c10::intrusive_ptr<c10d::Backend> lender(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const c10::Device& device) {
  // As Python: NCCL's own memory is taken on request only.
  const char* const is_off = std::getenv("DDP_DISABLE_COMM_MEM");
  if (!device.is_cpu() && (is_off == nullptr || std::strcmp(is_off, "0") != 0)) {
    return nullptr;
  }
  try {
    auto backend = group->getBackend(device.type());
    const auto index = device.has_index() ? device.index() : c10::DeviceIndex(0);
    return backend->supportsTensorAlloc(index) ? backend : nullptr;
  } catch (const std::exception&) {
    return nullptr;  // no backend for the device
  }
}

}  // namespace

MessageAllocator message_allocator(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return [group](std::int64_t numel, const at::TensorOptions& options) {
    if (const auto backend = lender(group, options.device())) {
      try {
        return backend->allocateTensor(static_cast<long>(numel), options);
      } catch (const std::exception&) {
        // No room: it costs a copy then, and nothing else.
      }
    }
    return at::empty({numel}, options);
  };
}

}  // namespace ddp::detail
