#include <dlfcn.h>

#include <fmt/format.h>

#include <ddp/process_group/nccl/cuda_driver.h>

namespace ddp::detail {
namespace {

constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

CudaDevices find_cuda_devices() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {0, "there is no NVIDIA driver on this machine (libcuda.so.1 could not be loaded)"};
  }
  const auto init = symbol<int (*)(unsigned)>(library, "cuInit");
  const auto get_count = symbol<int (*)(int*)>(library, "cuDeviceGetCount");
  if (init == nullptr || get_count == nullptr) {
    return {0, "libcuda.so.1 is not the NVIDIA driver's library"};
  }
  int count = 0;
  int error = init(0);
  if (error == 0) {
    error = get_count(&count);
  }
  if (error == kNoDevice || (error == 0 && count == 0)) {
    return {0, "no GPU is visible (nvidia-smi lists them, CUDA_VISIBLE_DEVICES chooses)"};
  }
  if (error != 0) {
    return {0, fmt::format("the NVIDIA driver gives the error {} (see nvidia-smi)", error)};
  }
  return {count, ""};
}

}  // namespace ddp::detail
