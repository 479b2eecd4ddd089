#pragma once

#include <string>

#include <ddp/process_group/nccl/cuda_driver.h>
#include <ddp/process_group/nccl/nccl_plugin.h>

namespace ddp::detail {

/// Opens the NCCL plug-in and makes cuda:`local_rank` current. `who` begins the text of a
/// UsageError, where there is no driver, no such device, no plug-in, or the device cannot be used.
const NcclPlugin& use_cuda_device(int local_rank, const std::string& who);

/// The error of a device that CUDA does not let this process use, with the remedy that its words
/// ask for.
std::string cuda_device_problem(int local_rank, const std::string& words);

}  // namespace ddp::detail
