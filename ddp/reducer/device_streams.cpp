#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <ddp/reducer/device_streams.h>

namespace ddp::detail {
namespace {

bool has_streams(const c10::Device& device) { return !device.is_cpu() && !device.is_meta(); }

/// Whether it was not in there.
bool insert(std::vector<c10::Stream>& streams, const c10::Stream& stream) {
  if (std::find(streams.begin(), streams.end(), stream) != streams.end()) {
    return false;
  }
  streams.push_back(stream);
  return true;
}

void record_on(const c10::Stream& stream, const at::Tensor& memory) {
  if (memory.has_storage()) {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(memory.storage().data_ptr(), stream);
  }
}

}  // namespace

DeviceStreams::DeviceStreams(const c10::Device& device)
    : device_(device), has_streams_(has_streams(device)) {}

void DeviceStreams::use(const at::Tensor& memory) {
  if (!has_streams_) {
    return;
  }
  const auto current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (insert(in_pass_, current) && insert(recorded_, current)) {
    record_on(current, memory);
  }
}

void DeviceStreams::use_after_others(const at::Tensor& memory) {
  if (!has_streams_) {
    return;
  }
  const auto current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  for (const auto& stream : in_pass_) {
    if (stream != current) {
      c10::Event done(device_.type());
      done.record(stream);
      done.block(current);
    }
  }
  use(memory);
}

void DeviceStreams::begin_pass() { in_pass_.clear(); }

void DeviceStreams::forget() {
  in_pass_.clear();
  recorded_.clear();
}

void record_on_current_stream(const at::Tensor& tensor) {
  if (has_streams(tensor.device())) {
    record_on(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()),
              tensor);
  }
}

}  // namespace ddp::detail
