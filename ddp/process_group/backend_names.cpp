#include <sstream>

#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/nccl/cuda_driver.h>
#include <ddp/process_group/nccl/open_plugin.h>

namespace ddp::detail {
namespace {

bool is_cpu_backend(const std::string& name) { return name == "gloo" || name == "shm"; }

}  // namespace

std::optional<BackendNames> parse_backend_names(const std::string& text) {
  if (text.empty() || is_cpu_backend(text)) {
    return BackendNames{text, false};
  }
  if (text == "nccl") {
    return BackendNames{"gloo", true};
  }
  BackendNames names;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part == "cuda:nccl" && !names.nccl) {
      names.nccl = true;
    } else if (part.rfind("cpu:", 0) == 0 && names.cpu.empty() && is_cpu_backend(part.substr(4))) {
      names.cpu = part.substr(4);
    } else {
      return std::nullopt;
    }
  }
  if (names.cpu.empty()) {
    names.cpu = "gloo";
  }
  return names;
}

std::string resolve_backend_name(const std::string& text) {
  if (!text.empty() || !nccl_plugin_exists() || find_cuda_devices().count == 0) {
    return text;
  }
  return "cpu:gloo,cuda:nccl";
}

}  // namespace ddp::detail
