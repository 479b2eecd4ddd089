#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/comm_hooks/hook_collectives.h>
#include <ddp/process_group/group_registry.h>
#include <ddp/reducer/device_backend.h>

namespace ddp::comm_hooks::detail {

ProcessGroup hook_group(const ProcessGroup& group) { return ddp::detail::resolve_group(group); }

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

c10::intrusive_ptr<c10d::Work> start_sum(const ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{as_real(tensor)};
  return group->allreduce(tensors);
}

c10::intrusive_ptr<c10d::Work> start_mean(const ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{as_real(tensor)};
  c10d::AllreduceOptions options;
  if (ddp::detail::averages_natively(*group, tensor.device(), tensors.front().scalar_type())) {
    options.reduceOp = c10d::ReduceOp::AVG;
  } else {
    tensor.div_(group->getSize());
  }
  return group->allreduce(tensors, options);
}

FuturePtr start_average(const ProcessGroup& group, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return start_mean(group, tensor)
      ->getFuture()
      ->then(
          [tensor](c10::ivalue::Future& sum) {
            sum.value();  // throws where it failed
            return c10::IValue(tensor);
          },
          c10::TensorType::get());
}

FuturePtr completed(const at::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(),
      tensor.is_cpu() ? std::vector<c10::Device>() : std::vector<c10::Device>{tensor.device()});
  future->markCompleted(tensor);
  return future;
}

}  // namespace ddp::comm_hooks::detail
