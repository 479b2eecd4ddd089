#pragma once

#include <cstdint>

#include <torch/arg.h>

#include <ddp/process_group/process_group.h>
#include <ddp/reducer/comm_hook.h>

namespace ddp::comm_hooks {

/// Options of `post_local_sgd`, the same on all ranks but for the groups.
class PostLocalSGDOptions {
 public:
  /* implicit */ PostLocalSGDOptions(std::int64_t start_local_sgd_iter)
      : start_local_sgd_iter_(start_local_sgd_iter) {}

  /// The step (counted in reduced passes) from which gradients are averaged within `subgroup` only.
  TORCH_ARG(std::int64_t, start_local_sgd_iter);
  /// False: from that step on gradients are not averaged at all.
  TORCH_ARG(bool, post_local_gradient_allreduce) = true;
  /// The model's group; empty: the default group.
  TORCH_ARG(ProcessGroup, process_group);
  /// This rank's part of it. Empty: the ranks of this node, as LOCAL_RANK and LOCAL_WORLD_SIZE say;
  /// `post_local_sgd` then makes that group, and every rank calls it at the same place.
  TORCH_ARG(ProcessGroup, subgroup);
};

/// Averages gradients over all ranks until a step, and from then on among few, together with a
/// `ddp::PeriodicModelAverager` that averages the parameters over all ranks now and then. Lin,
/// Stich, Patel, Jaggi: Don't use large mini-batches, use local SGD, ICLR 2020,
/// https://arxiv.org/abs/1808.07217; Python's
/// torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.
///
/// For one model; thread-safe as the model is. Throws UsageError where this rank is not in a group,
/// CommunicationError where the node's group cannot be made.
///
///     model->register_comm_hook(ddp::comm_hooks::post_local_sgd(100));
///     ddp::PeriodicModelAverager averager(
///         ddp::PeriodicModelAveragerOptions(/*period=*/4).warmup_steps(100));
///     ...
///     optimizer.step();
///     averager.average_parameters(model->parameters());
CommHook post_local_sgd(const PostLocalSGDOptions& options);

}  // namespace ddp::comm_hooks
