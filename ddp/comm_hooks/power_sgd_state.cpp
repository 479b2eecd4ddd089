#include <stdexcept>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <ddp/comm_hooks/power_sgd_state.h>
#include <ddp/error.h>

namespace ddp::comm_hooks::detail {
namespace {

const PowerSGDOptions& checked(const PowerSGDOptions& options, const char* name) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(fmt::format("{}: {}", name, why));
  };
  if (options.matrix_approximation_rank() < 1) {
    refuse(fmt::format("matrix_approximation_rank is {}; it must be at least 1",
                       options.matrix_approximation_rank()));
  }
  if ((options.use_error_feedback() || options.warm_start()) &&
      options.start_power_sgd_iter() <= 1) {
    refuse(
        fmt::format("start_power_sgd_iter is {}; with use_error_feedback or warm_start it must be "
                    "at least 2, since the first step has other buckets than the later ones",
                    options.start_power_sgd_iter()));
  }
  if (options.random_seed() < 0 || options.random_seed() > 0xFFFFFFFFLL) {
    refuse(
        fmt::format("random_seed is {}; it must be from 0 to 4294967295", options.random_seed()));
  }
  if (!(options.orthogonalization_epsilon() >= 0)) {
    refuse(fmt::format("orthogonalization_epsilon is {}; it must not be negative",
                       options.orthogonalization_epsilon()));
  }
  return options;
}

}  // namespace

PowerSGDState::PowerSGDState(const PowerSGDOptions& given, const ProcessGroup& given_group,
                             const char* name)
    : options(checked(given, name)),
      group(hook_group(given_group)),
      seeds(static_cast<std::uint32_t>(given.random_seed())) {}

bool PowerSGDState::is_before_start(const c10d::GradBucket& bucket) {
  const bool is_before = step < options.start_power_sgd_iter();
  if (is_before && bucket.isLast()) {
    ++step;
  }
  return is_before;
}

void PowerSGDState::add_error(const BucketMemory& last, const at::Tensor& values) const {
  if (!last.error.defined()) {
    return;
  }
  if (last.error.numel() != values.numel()) {
    throw std::runtime_error(fmt::format(
        "the bucket has {} elements and had {} in the step before: the hook serves two models, or "
        "was registered before the buckets were final",
        values.numel(), last.error.numel()));
  }
  values.add_(last.error);
}

}  // namespace ddp::comm_hooks::detail
