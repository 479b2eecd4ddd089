#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/arg.h>
#include <torch/data/samplers/base.h>

namespace ddp {

/// Options of `DistributedSampler`, with Python's names and defaults.
class DistributedSamplerOptions {
 public:
  /// The number of ranks that share the dataset; not given: of the default process group, and 1 in
  /// a program without one.
  TORCH_ARG(std::optional<int>, num_replicas);
  /// This process's rank among them; not given: in the default process group, and 0 without one.
  TORCH_ARG(std::optional<int>, rank);
  /// A new order every epoch, the same on all ranks; false: the dataset's own order.
  TORCH_ARG(bool, shuffle) = true;
  /// Where the orders come from, together with the epoch. The same on all ranks.
  TORCH_ARG(std::int64_t, seed) = 0;
  /// What becomes of a dataset that the ranks cannot share evenly: true leaves its tail out (of the
  /// shuffled order: another one every epoch), false repeats its head.
  TORCH_ARG(bool, drop_last) = false;
};

/// Gives each rank its own part of a dataset, of equal length on all ranks: every W-th index of the
/// epoch's order, from the rank on. The order is the one that Python's
/// torch.utils.data.DistributedSampler makes of the same seed and epoch, index for index.
///
///     ddp::DistributedSampler sampler(dataset.size().value());
///     auto loader = torch::data::make_data_loader(std::move(dataset), sampler, /*options=*/64);
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) { ... }
///     }
///
/// A data loader keeps a copy of its sampler. Copies share the epoch, so `set_epoch` reaches the
/// loader's; they do not share the position in it. Without `set_epoch` every epoch has the same
/// order.
///
/// Thread safety: used by the thread that iterates the loader (its workers never touch the
/// sampler). Errors: UsageError, from the constructor for a bad combination of options, and from
/// `reset` where the process group was made after the sampler that was to use it.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `size`: the number of examples in the whole dataset.
  explicit DistributedSampler(std::size_t size, DistributedSamplerOptions options = {});

  // No move: a sampler that was moved into a loader still reaches it with set_epoch.
  DistributedSampler(const DistributedSampler&) = default;
  DistributedSampler& operator=(const DistributedSampler&) = default;
  ~DistributedSampler() override = default;

  /// Chooses the order from the next `reset()` on: the next time a loop over the loader begins.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const;

  /// The number of examples that this rank gets in an epoch; the same on all ranks. The repeated
  /// ones count, so a sum over the ranks may exceed the dataset.
  std::size_t size() const;

  /// Begins an epoch, optionally for a dataset of another size. The loader calls it.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;

  /// This rank's next `batch_size` indices, fewer in its last batch, none at the epoch's end.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Keeps the epoch and the position in it. A loader that has worker threads runs ahead of what
  /// the program has seen, and the position with it.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Continues where `save` was called, given the same dataset and options.
  void load(torch::serialize::InputArchive& archive) override;

  /// The options, with `num_replicas` and `rank` filled in.
  const DistributedSamplerOptions& options() const { return options_; }

 private:
  void make_order();
  void check_group() const;

  std::size_t dataset_size_;
  DistributedSamplerOptions options_;
  bool assumed_single_process_ = false;
  std::shared_ptr<std::int64_t> epoch_;  // shared with all copies
  std::optional<std::vector<std::size_t>> order_;
  std::size_t position_ = 0;
};

}  // namespace ddp
