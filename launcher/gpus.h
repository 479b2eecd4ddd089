#pragma once

#include <string>
#include <vector>

namespace ddp::launcher {

/// The GPUs of this machine, as the CUDA driver counts them: CUDA_VISIBLE_DEVICES is honoured.
struct Gpus {
  std::vector<std::string> pci_addresses;  ///< one for each, as in sysfs: "0000:3b:00.0"
  std::string error;                       ///< why there are none to be seen

  int count() const { return static_cast<int>(pci_addresses.size()); }
};

/// Asks the driver's library (libcuda.so.1, opened only here). It is asked in a process of its own:
/// its threads and memory stay out of the launcher.
Gpus find_gpus();

}  // namespace ddp::launcher
