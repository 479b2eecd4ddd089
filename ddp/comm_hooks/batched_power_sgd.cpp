#include <algorithm>
#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/comm_hooks/power_sgd_state.h>

namespace ddp::comm_hooks {
namespace {

using detail::PowerSGDState;

at::Tensor run(PowerSGDState& state, std::size_t bucket, const at::Tensor& buffer) {
  const auto& options = state.options;
  auto& memory = state.memory[bucket];
  const auto side = static_cast<std::int64_t>(std::ceil(std::sqrt(buffer.numel())));
  const auto padded = at::zeros({side * side}, buffer.options());
  padded.narrow(0, 0, buffer.numel()).copy_(buffer);
  at::Tensor before;
  if (options.use_error_feedback()) {
    state.add_error(memory, padded);
    before = padded.clone();
  }
  auto matrix = padded.view({side, side});
  if (!memory.p.defined()) {
    const auto rank = std::min(side, options.matrix_approximation_rank());
    memory.p = at::empty({side, rank}, buffer.options());
    memory.q = at::empty({side, rank}, buffer.options());
    detail::fill_randomly(memory.q, state.seeds.next_generator());
  }
  detail::orthogonalize(memory.q.unsqueeze(0), options.orthogonalization_epsilon());
  at::matmul_out(memory.p, matrix, memory.q);
  state.worker.wait(*detail::start_sum(state.group, memory.p));
  detail::orthogonalize(memory.p.unsqueeze(0), options.orthogonalization_epsilon());
  at::matmul_out(memory.q, matrix.t(), memory.p);
  state.worker.wait(*detail::start_sum(state.group, memory.q));
  memory.q.div_(state.group->getSize());
  at::matmul_out(matrix, memory.p, memory.q.t());
  if (options.use_error_feedback()) {
    memory.error = before - padded;
  }
  if (!options.warm_start()) {
    memory.p.reset();
    memory.q.reset();
  }
  buffer.copy_(padded.narrow(0, 0, buffer.numel()));
  return buffer;
}

}  // namespace

CommHook batched_power_sgd(const PowerSGDOptions& options, const ProcessGroup& group) {
  const auto state = std::make_shared<PowerSGDState>(options, group, "batched_power_sgd");
  return [state](c10d::GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const auto buffer = bucket.getBuffer();
    if (state->is_before_start(bucket) || buffer.is_complex() || buffer.numel() == 0) {
      return detail::start_average(state->group, buffer);
    }
    // Without a hold on the state: see power_sgd.
    return state->worker.run(buffer, [&state = *state, index = bucket.getIndex(), buffer] {
      return run(state, index, buffer);
    });
  };
}

}  // namespace ddp::comm_hooks
