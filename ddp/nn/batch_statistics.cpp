#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/error.h>
#include <ddp/nn/batch_statistics.h>
#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/group_registry.h>

namespace ddp::detail {
namespace {

/// A rank's row: mean and sum of squared deviations of each channel, the count, the BackwardPart.
/// Always double: exact counts, and ranks whose inputs differ in dtype still match.
at::Tensor own_row(const at::Tensor& input, BackwardPart part) {
  const auto channels = input.size(1);
  const auto wire = input.options().dtype(at::kDouble);
  auto row = at::zeros({2 * channels + 2}, wire);
  if (input.numel() > 0) {
    const auto count = static_cast<double>(input.numel() / channels);
    // The running statistics that this also updates are of no use; their dtype is the result's.
    const auto dtype = at::toOpMathType(input.scalar_type());
    const auto [mean, variance] =
        at::batch_norm_update_stats(input, at::zeros({channels}, wire.dtype(dtype)),
                                    at::ones({channels}, wire.dtype(dtype)), /*momentum=*/0.1);
    row.narrow(0, 0, channels).copy_(mean);
    row.narrow(0, channels, channels).copy_(variance).mul_(count);
    row[2 * channels].fill_(count);
  }
  row[2 * channels + 1].fill_(static_cast<double>(part));
  return row;
}

at::Tensor rows_of_all(const at::Tensor& row, const ProcessGroup& group) {
  const CollectiveCall call(group, "SyncBatchNorm's all-gather of batch statistics");
  auto rows = at::empty({call.size(), row.numel()}, row.options());
  auto to = rows.flatten();
  auto from = call.to_move(row);
  call.run(/*async_op=*/false, [&] { return call.group()._allgather_base(to, from); });
  return rows;
}

/// A graph on some ranks only: their backward would wait for the others' for ever.
void check_parts(const std::vector<BackwardPart>& parts, const CollectiveCall& call) {
  std::vector<int> with;
  std::vector<int> without;
  for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank) {
    if (parts[rank] != BackwardPart::kParameters) {
      (parts[rank] == BackwardPart::kInput ? with : without).push_back(rank);
    }
  }
  if (!with.empty() && !without.empty()) {
    call.refuse(fmt::format(
        "the input requires a gradient on rank {}, and no graph is recorded on rank {}, whose part "
        "in backward would be missing; run the layer in training mode on all ranks alike, with or "
        "without torch::NoGradGuard and the same parameters frozen (evaluation mode, "
        "model->eval(), is free of this)",
        fmt::join(with, ", "), fmt::join(without, ", ")));
  }
}

}  // namespace

BatchStatistics gather_batch_statistics(const at::Tensor& input, BackwardPart part,
                                        const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const CollectiveCall call(group, "SyncBatchNorm");
  if (!channel_of(group)->all_are_members()) {
    call.refuse(
        "the group has ranks that are no C++ ranks of this library, and Python's SyncBatchNorm "
        "sends something else; use a torch::nn::BatchNorm, or C++ ranks alone");
  }
  const auto channels = input.size(1);
  const auto rows = rows_of_all(own_row(input, part), group);
  const auto tails = rows.narrow(1, 2 * channels, 2).cpu();  // one wait for the device

  BatchStatistics result;
  std::vector<BackwardPart> parts;
  for (int rank = 0; rank < call.size(); ++rank) {
    result.count += tails[rank][0].item<double>();
    parts.push_back(static_cast<BackwardPart>(tails[rank][1].item<double>()));
    result.reduces_in_backward |= parts.back() == BackwardPart::kInput;
  }
  check_parts(parts, call);
  if (result.count < 2) {
    call.refuse(
        fmt::format("Expected more than 1 value per channel when training, found {} on all {} "
                    "ranks together (this rank's input is [{}]); give a larger batch to any rank, "
                    "or call model->eval() on all",
                    result.count, call.size(), fmt::join(input.sizes(), ", ")));
  }
  // Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
  // variances, 1979.
  const auto means = rows.narrow(1, 0, channels);
  const auto counts = rows.narrow(1, 2 * channels, 1);
  result.mean = (means * counts).sum(0) / result.count;
  const auto deviations = means - result.mean;
  result.variance =
      (rows.narrow(1, channels, channels) + counts * deviations * deviations).sum(0) / result.count;
  return result;
}

}  // namespace ddp::detail
