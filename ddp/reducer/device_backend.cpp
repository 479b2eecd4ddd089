#include <exception>
#include <string>

#include <ddp/reducer/device_backend.h>

namespace ddp::detail {
namespace {

/// "" where the group has no backend of c10d's kind for the device.
std::string backend_name(c10d::ProcessGroup& group, const c10::Device& device) {
  try {
    return group.getBackend(device.type())->getBackendName();
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace

WaitKind wait_kind(c10d::ProcessGroup& group, const c10::Device& device) {
  if (device.is_cpu()) {
    return WaitKind::kHost;
  }
  // Gloo copies to the host and back, and its works end when that is done.
  const auto name = backend_name(group, device);
  return name == "gloo" || name == "shm" ? WaitKind::kHost : WaitKind::kStream;
}

bool averages_natively(c10d::ProcessGroup& group, const c10::Device& device,
                       c10::ScalarType dtype) {
  return !device.is_cpu() && c10::isFloatingType(dtype) && backend_name(group, device) == "nccl";
}

}  // namespace ddp::detail
