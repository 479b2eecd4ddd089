#pragma once

#include <string>

namespace ddp::detail {

/// The GPUs that this process may use, as the NVIDIA driver counts them: CUDA_VISIBLE_DEVICES is
/// honoured.
struct CudaDevices {
  int count = 0;
  /// Why there are none.
  std::string problem;
};

/// Asks the driver's library (libcuda.so.1, opened only here). Needs nothing else of CUDA. The
/// process, if there is a driver, cannot use CUDA after a fork from then on. Thread-safe.
CudaDevices find_cuda_devices();

}  // namespace ddp::detail
