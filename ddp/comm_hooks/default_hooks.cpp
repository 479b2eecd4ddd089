#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/comm_hooks/default_hooks.h>
#include <ddp/comm_hooks/hook_collectives.h>
#include <ddp/error.h>

namespace ddp::comm_hooks {
namespace {

CommHook compress(const ProcessGroup& group, at::ScalarType dtype) {
  return [group = detail::hook_group(group), dtype](c10d::GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const auto whole = detail::as_real(bucket.getBuffer());
    const auto compressed = whole.to(dtype).div_(group->getSize());
    return detail::start_sum(group, compressed)
        ->getFuture()
        ->then(
            [buffer = bucket.getBuffer(), whole, compressed](c10::ivalue::Future& sum) {
              const at::NoGradGuard callback_no_grad;
              sum.value();  // throws where it failed
              whole.copy_(compressed);
              return c10::IValue(buffer);
            },
            c10::TensorType::get());
  };
}

CommHook compress_around(CommHook hook, at::ScalarType dtype, const char* name) {
  if (!hook) {
    throw UsageError(std::string(name) + ": the hook to wrap is empty");
  }
  return [hook = std::move(hook), dtype](c10d::GradBucket& bucket) -> detail::FuturePtr {
    const at::NoGradGuard no_grad;
    if (bucket.getBuffer().is_complex()) {
      return hook(bucket);
    }
    auto compressed = bucket.getBuffer().to(dtype);
    bucket.setBuffer(compressed);
    const auto future = hook(bucket);
    if (!future) {
      return future;
    }
    // The result stays in this precision until it is copied into the gradients.
    return future->then(
        [compressed](c10::ivalue::Future& inner) {
          const at::NoGradGuard callback_no_grad;
          const auto result = ddp::detail::parse_hook_result(inner.value());
          // A sparse one cannot be reshaped.
          compressed.copy_(result.is_sparse() ? result : result.reshape_as(compressed));
          return c10::IValue(compressed);
        },
        c10::TensorType::get());
  };
}

}  // namespace

CommHook allreduce(const ProcessGroup& group) {
  return [group = detail::hook_group(group)](c10d::GradBucket& bucket) {
    return detail::start_average(group, bucket.getBuffer());
  };
}

CommHook fp16_compress(const ProcessGroup& group) { return compress(group, at::kHalf); }

CommHook bf16_compress(const ProcessGroup& group) { return compress(group, at::kBFloat16); }

CommHook fp16_compress_wrapper(CommHook hook) {
  return compress_around(std::move(hook), at::kHalf, "fp16_compress_wrapper");
}

CommHook bf16_compress_wrapper(CommHook hook) {
  return compress_around(std::move(hook), at::kBFloat16, "bf16_compress_wrapper");
}

CommHook from_native(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (!hook) {
    throw UsageError("register_comm_hook: the c10d::CommHookInterface is null");
  }
  return [hook = std::move(hook)](c10d::GradBucket& bucket) -> detail::FuturePtr {
    const auto future = hook->runHook(bucket);
    if (!future) {
      return future;
    }
    return future->then(
        [hook](c10::ivalue::Future& result) {
          return c10::IValue(hook->parseHookResult(result.value()));
        },
        c10::TensorType::get());
  };
}

}  // namespace ddp::comm_hooks
