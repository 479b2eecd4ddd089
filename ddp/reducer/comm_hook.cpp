#include <stdexcept>

#include <fmt/format.h>

#include <ddp/reducer/comm_hook.h>

namespace ddp::detail {

at::Tensor parse_hook_result(const c10::IValue& result) {
  at::Tensor tensor;
  if (result.isTensor()) {
    tensor = result.toTensor();
  } else if (result.isTensorList() && !result.toTensorList().empty()) {
    tensor = result.toTensorVector().front();
  } else {
    throw std::runtime_error(fmt::format(
        "the future that it returned holds {}; expected a tensor, or a list that begins with one",
        result.isTensorList() ? "an empty list" : result.tagKind()));
  }
  if (!tensor.defined()) {
    throw std::runtime_error("the future that it returned holds an undefined tensor");
  }
  return tensor;
}

}  // namespace ddp::detail
