#include <algorithm>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <ddp/data/distributed_sampler.h>
#include <ddp/error.h>
#include <ddp/process_group/process_group.h>

namespace ddp {
namespace {

/// The dataset's indices in the epoch's order, as Python's sampler draws them.
at::Tensor permutation(std::size_t size, std::int64_t seed, std::int64_t epoch) {
  // Python's integers do not overflow, and manual_seed takes what is negative modulo 2^64.
  const auto value = static_cast<std::uint64_t>(seed) + static_cast<std::uint64_t>(epoch);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(value);
  return at::randperm(static_cast<std::int64_t>(size), generator, at::kLong);
}

}  // namespace

DistributedSampler::DistributedSampler(std::size_t size, DistributedSamplerOptions options)
    : dataset_size_(size), options_(std::move(options)), epoch_(std::make_shared<std::int64_t>(0)) {
  const bool has_group = is_initialized();
  if (!has_group && options_.num_replicas().has_value() != options_.rank().has_value()) {
    throw UsageError(fmt::format(
        "DistributedSampler: {0} is given but {1} is not, and there is no process group to take it "
        "from; set both "
        "num_replicas and rank, or call ddp::init_process_group() first",
        options_.rank() ? "rank" : "num_replicas", options_.rank() ? "num_replicas" : "rank"));
  }
  assumed_single_process_ = !has_group && !options_.num_replicas();
  if (!options_.num_replicas()) {
    options_.num_replicas(has_group ? get_world_size() : 1);
  }
  if (!options_.rank()) {
    options_.rank(has_group ? get_rank() : 0);
  }
  if (*options_.num_replicas() < 1 || *options_.rank() < 0 ||
      *options_.rank() >= *options_.num_replicas()) {
    throw UsageError(
        fmt::format("DistributedSampler: rank {} of num_replicas {}; expected at least one "
                    "replica, and ranks from 0 to "
                    "num_replicas - 1",
                    *options_.rank(), *options_.num_replicas()));
  }
}

void DistributedSampler::set_epoch(std::int64_t epoch) { *epoch_ = epoch; }

std::int64_t DistributedSampler::epoch() const { return *epoch_; }

std::size_t DistributedSampler::size() const {
  const auto replicas = static_cast<std::size_t>(*options_.num_replicas());
  const bool repeats = !options_.drop_last() && dataset_size_ % replicas != 0;
  return dataset_size_ / replicas + (repeats ? 1 : 0);
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  check_group();
  dataset_size_ = new_size.value_or(dataset_size_);
  make_order();
  position_ = 0;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  if (!order_) {
    reset();
  }
  const auto count = std::min(batch_size, order_->size() - position_);
  if (count == 0) {
    return std::nullopt;
  }
  const auto first = order_->begin() + static_cast<std::ptrdiff_t>(position_);
  position_ += count;
  return std::vector<std::size_t>(first, first + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", c10::IValue(*epoch_));
  archive.write("position", c10::IValue(static_cast<std::int64_t>(position_)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch;
  c10::IValue position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  const auto saved = position.toInt();
  if (saved < 0 || static_cast<std::size_t>(saved) > size()) {
    throw UsageError(
        fmt::format("DistributedSampler: rank {}: the archive's position is {}, but an epoch has "
                    "{} examples here; load it with "
                    "the dataset and the number of ranks that it was saved with",
                    *options_.rank(), saved, size()));
  }
  set_epoch(epoch.toInt());
  reset();
  position_ = static_cast<std::size_t>(saved);
}

void DistributedSampler::make_order() {
  auto& order = order_.emplace(size());
  const auto rank = static_cast<std::size_t>(*options_.rank());
  const auto replicas = static_cast<std::size_t>(*options_.num_replicas());
  for (std::size_t i = 0; i < order.size(); ++i) {
    // Beyond the end the order begins again, as often as it takes.
    order[i] = (rank + i * replicas) % dataset_size_;
  }
  if (options_.shuffle()) {
    const auto permuted = permutation(dataset_size_, options_.seed(), *epoch_);
    const auto* indices = permuted.const_data_ptr<std::int64_t>();
    std::transform(order.begin(), order.end(), order.begin(), [indices](std::size_t place) {
      return static_cast<std::size_t>(indices[place]);
    });
  }
}

void DistributedSampler::check_group() const {
  if (assumed_single_process_ && is_initialized() && get_world_size() > 1) {
    throw UsageError(fmt::format(
        "DistributedSampler: rank {}: the sampler was made before ddp::init_process_group(), so "
        "each of the {} ranks "
        "would train on the whole dataset; make it afterwards, or set num_replicas and rank",
        get_rank(), get_world_size()));
  }
}

}  // namespace ddp
