#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace ddp::detail {

/// Which of a device's streams work on one piece of its memory. Autograd runs each hook with the
/// stream of its parameter as the current one, and backward() was called with yet another: what one
/// of them reads after another has written must wait for it, on the device, and the allocator must
/// know of all of them, or it gives the memory away while one still works on it.
///
/// On the CPU, and on other devices without streams, all of it is nothing. Not thread-safe.
class DeviceStreams {
 public:
  explicit DeviceStreams(const c10::Device& device);

  /// The current stream works on `memory` from here on.
  void use(const at::Tensor& memory);
  /// The same, after all that other streams have been given up to now of what they use.
  void use_after_others(const at::Tensor& memory);
  /// What was used before is done with: nobody waits for it any more.
  void begin_pass();
  /// The memory is another one from here on, of which the allocator knows nothing yet.
  void forget();

 private:
  const c10::Device device_;
  const bool has_streams_;
  std::vector<c10::Stream> in_pass_;
  std::vector<c10::Stream> recorded_;
};

/// The allocator learns that the current stream of the tensor's device works on its memory.
void record_on_current_stream(const at::Tensor& tensor);

}  // namespace ddp::detail
