#include <future>
#include <thread>

#include <ddp/process_group/group_end.h>
#include <ddp/reducer/device_backend.h>

namespace ddp::detail {
namespace {

c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// Whether the backend came to its end by itself.
bool shut_down(const c10::intrusive_ptr<c10d::Backend>& backend,
               std::chrono::milliseconds patience) {
  std::packaged_task<void()> task([backend] { backend->shutdown(); });
  auto end = task.get_future();
  std::thread(std::move(task)).detach();
  if (end.wait_for(patience) != std::future_status::ready) {
    return false;
  }
  try {
    end.get();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void end_group(c10d::ProcessGroup& group, StoreChannel& channel,
               std::chrono::milliseconds patience) {
  const auto on_device = backend_for(group, c10::DeviceType::CUDA);
  const bool is_separate =
      wait_kind(group, c10::Device(c10::DeviceType::CUDA)) == WaitKind::kStream;
  if (on_device && is_separate && channel.failure().empty() && !channel.peer_lost() &&
      shut_down(on_device, patience)) {
    if (const auto on_cpu = backend_for(group, c10::DeviceType::CPU)) {
      try {
        on_cpu->abort();
      } catch (const std::exception&) {
        // Its connections end with the process.
      }
    }
    return;
  }
  channel.end_operations();
}

}  // namespace ddp::detail
