#include <algorithm>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/module_devices.h>

namespace ddp::detail {

std::optional<c10::Device> find_input_device(const std::vector<NamedParameter>& parameters,
                                             const std::vector<c10::Device>& device_ids,
                                             const std::optional<c10::Device>& output_device,
                                             const std::string& who) {
  const auto& first = parameters.front();
  const auto device = first.tensor.device();
  const auto other = std::find_if(parameters.begin(), parameters.end(), [&](const auto& parameter) {
    return parameter.tensor.device() != device;
  });
  const bool is_spread = other != parameters.end();
  if (is_spread && other->tensor.device().type() != device.type()) {
    throw UsageError(fmt::format(
        "{}the parameter {} is on {} and {} on {}: move the whole module to one kind of device "
        "before wrapping it, module->to(device)",
        who, first.name, device.str(), other->name, other->tensor.device().str()));
  }
  if (device_ids.empty() && !output_device) {
    return std::nullopt;
  }
  if (device_ids.size() > 1) {
    throw UsageError(fmt::format(
        "{}device_ids has {} devices; a process trains on one: start a process for each device "
        "(launch --nproc-per-node={}) and give it its own, device_ids({{ddp::local_device()}})",
        who, device_ids.size(), device_ids.size()));
  }
  if (device.is_cpu() || is_spread) {
    throw UsageError(
        fmt::format("{}device_ids and output_device are for a module on a single device that is "
                    "not the CPU; this one is on {}. {}",
                    who, is_spread ? "several devices" : "the CPU",
                    is_spread ? "Leave them out, and move the inputs in the module's forward."
                              : "Leave them out, or move the module before wrapping it, "
                                "module->to(ddp::local_device())."));
  }
  if (!device_ids.empty() && device_ids.front() != device) {
    throw UsageError(
        fmt::format("{}device_ids is {{{}}}, but the module is on {}: move it before wrapping, "
                    "module->to(ddp::local_device()), or name its device",
                    who, device_ids.front().str(), device.str()));
  }
  return device_ids.empty() ? std::nullopt : std::optional(device_ids.front());
}

void check_backend_fits(const std::vector<NamedParameter>& parameters, const std::string& backend,
                        const std::string& who) {
  const auto& first = parameters.front();
  if (backend == "nccl" && first.tensor.is_cpu()) {
    throw UsageError(fmt::format(
        "{}the module is on the CPU (its parameter {}), and the process group is over NCCL: move "
        "it before wrapping it, module->to(ddp::local_device()); to train on the CPU, take "
        "init_process_group(\"gloo\"), or a new_group over \"gloo\" for this module",
        who, first.name));
  }
}

}  // namespace ddp::detail
