#pragma once

#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <ddp/reducer/named_parameter.h>

namespace ddp::detail {

/// Checks where the module is against the options `device_ids` and `output_device`, and returns the
/// device that inputs are moved to; empty: none. Throws UsageError, whose text begins with `who`,
/// where parameters are on the CPU and on other devices, where the module is not on the given
/// device, and where devices are given to a module on the CPU or on several devices.
std::optional<c10::Device> find_input_device(const std::vector<NamedParameter>& parameters,
                                             const std::vector<c10::Device>& device_ids,
                                             const std::optional<c10::Device>& output_device,
                                             const std::string& who);

/// Throws UsageError, whose text begins with `who`, where a module is on the CPU and its group's
/// backend for CUDA tensors is "nccl": it was forgotten there.
void check_backend_fits(const std::vector<NamedParameter>& parameters, const std::string& backend,
                        const std::string& who);

}  // namespace ddp::detail
