#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

// A device whose kernels are late, and run out of order wherever nobody has ordered them:
// LibTorch's PrivateUse1. A stream's kernels stand in a queue until somebody reads a tensor, and
// then only those run that come before the read: in its own stream, and, through the events that
// were waited for, in others. So what lacks a wait reads memory that is not written yet (it begins
// as NaN), every time. Memory that is freed while a stream may still work on it, of which the
// allocator was not told, is NaN for that stream. Link it into a test program of its own.

namespace ddp::test {

/// To be called before anything else of LibTorch that concerns the device.
void enable_fake_device();

c10::Device fake_device();

/// A stream of its own.
c10::Stream new_fake_stream();

/// Puts a kernel into the queue of `stream`; `used` is the memory it works on.
void launch_fake_kernel(const c10::Stream& stream, const std::vector<at::Tensor>& used,
                        std::function<void()> kernel);

/// A tensor of the CPU over the same memory, for use inside of a kernel.
at::Tensor memory_of(const at::Tensor& tensor);

/// `waiter` waits for all that `stream` has been given up to now.
void order_streams(const c10::Stream& stream, const c10::Stream& waiter);

/// The tensor's values, read in the current stream.
std::vector<float> read_fake(const at::Tensor& tensor);

/// How often a thread has waited for the device, but by `read_fake`.
int host_waits();

/// How often a kernel has worked on memory that the allocator had given away.
int misuses();

}  // namespace ddp::test
