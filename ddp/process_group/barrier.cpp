#include <fmt/format.h>

#include <ddp/error_text.h>
#include <ddp/process_group/barrier.h>
#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/group_registry.h>

namespace ddp {
namespace {

bool has_cpu_backend(c10d::ProcessGroup& group) {
  try {
    return static_cast<bool>(group.getBackend(c10::DeviceType::CPU));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

Work barrier(const BarrierOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "barrier");
  c10d::BarrierOptions native;
  native.asyncOp = options.async_op();
  if (has_cpu_backend(call.group())) {  // as in Python: beside NCCL too
    native.device = c10::Device(c10::DeviceType::CPU);
  }
  return call.run(options.async_op(), [&] { return call.group().barrier(native); });
}

void barrier(const ProcessGroup& group) { barrier(BarrierOptions(), group); }

void monitored_barrier(const MonitoredBarrierOptions& options,
                       const ProcessGroup& group_or_default) {
  const auto group = detail::resolve_group(group_or_default);
  const detail::CollectiveCall call(group, "monitored_barrier");
  if (options.timeout() < std::chrono::milliseconds::zero()) {
    call.refuse(fmt::format("timeout is {} ms; it must be positive, or 0 for the group's",
                            options.timeout().count()));
  }
  const auto channel = detail::channel_of(group);
  c10d::BarrierOptions native;
  native.timeout = options.timeout() > std::chrono::milliseconds::zero() ? options.timeout()
                                                                         : channel->timeout();
  try {
    call.group().monitoredBarrier(native, options.wait_all_ranks());
  } catch (const std::exception& error) {
    detail::fail_collective(*channel, "monitored_barrier", detail::concise(error));
  }
}

}  // namespace ddp
