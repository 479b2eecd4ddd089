#pragma once

#include <memory>
#include <type_traits>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <ddp/nn/sync_batch_norm.h>
#include <ddp/process_group/process_group.h>

namespace ddp {

namespace detail {

template <class Impl>
inline constexpr bool kIsBatchNorm = std::is_same_v<Impl, torch::nn::BatchNorm1dImpl> ||
                                     std::is_same_v<Impl, torch::nn::BatchNorm2dImpl> ||
                                     std::is_same_v<Impl, torch::nn::BatchNorm3dImpl>;

std::shared_ptr<torch::nn::Module> convert_batch_norms(
    const std::shared_ptr<torch::nn::Module>& module, const ProcessGroup& group);

}  // namespace detail

/// Makes a `SyncBatchNorm` of every `torch::nn::BatchNorm1d`, `2d` and `3d` that stands in a
/// `torch::nn::Sequential` (or a class derived from it, whose forward is Sequential's), wherever in
/// `module` that is; the Sequentials stay the same objects. What is converted shares its parameters
/// and buffers with the old layer, and keeps its names, options and mode. Returns `module`, or
/// where that is a BatchNorm itself, a new SyncBatchNorm. To be called before wrapping, on every
/// rank; it communicates nothing.
///
/// `group`: the ranks whose batches are one; empty: the default group.
///
/// A batch norm that is a typed member of a module class, or in a ModuleList or ModuleDict, cannot
/// be replaced, as the code that runs it holds it by its type: it is declared as
/// `ddp::SyncBatchNorm`. Where there are such (or ones of a class derived from BatchNorm)
/// UsageError lists all their names, and nothing is changed.
///
/// Not thread-safe.
///
///     torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8));
///     ddp::convert_sync_batchnorm(net);
///     ddp::DistributedDataParallel model(net);
template <class Holder>
auto convert_sync_batchnorm(const Holder& module,
                            const ProcessGroup& group = {}) requires requires {
  typename Holder::ContainedType;
}
{
  auto converted = detail::convert_batch_norms(module.is_empty() ? nullptr : module.ptr(), group);
  if constexpr (detail::kIsBatchNorm<typename Holder::ContainedType>) {
    return SyncBatchNorm(std::static_pointer_cast<SyncBatchNormImpl>(std::move(converted)));
  } else {
    return module;
  }
}

/// The same for a pointer to a module class.
template <class Impl>
auto convert_sync_batchnorm(const std::shared_ptr<Impl>& module, const ProcessGroup& group = {}) {
  auto converted = detail::convert_batch_norms(module, group);
  if constexpr (detail::kIsBatchNorm<Impl>) {
    return std::static_pointer_cast<SyncBatchNormImpl>(std::move(converted));
  } else if constexpr (std::is_same_v<Impl, torch::nn::Module>) {
    return converted;
  } else {
    return module;
  }
}

}  // namespace ddp
