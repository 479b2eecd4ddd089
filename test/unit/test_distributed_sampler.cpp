#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <test/support/catch2.h>
#include <vector>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/serialize.h>

#include <ddp/data/distributed_sampler.h>
#include <ddp/error.h>

namespace {

using Indices = std::vector<std::size_t>;

ddp::DistributedSamplerOptions share(int rank, int num_replicas) {
  return ddp::DistributedSamplerOptions().num_replicas(num_replicas).rank(rank);
}

Indices rest_of_epoch(ddp::DistributedSampler& sampler, std::size_t batch_size) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) {
    CHECK(!batch->empty());
    CHECK(batch->size() <= batch_size);
    all.insert(all.end(), batch->begin(), batch->end());
  }
  return all;
}

struct Reference {
  std::size_t size;
  int num_replicas;
  bool shuffle;
  std::int64_t seed;
  std::int64_t epoch;
  bool drop_last;
  std::vector<Indices> expected;  // by rank
};

// What torch.utils.data.DistributedSampler of PyTorch 2.11.0 gives:
//   s = DistributedSampler(range(size), num_replicas, rank, shuffle, seed, drop_last)
//   s.set_epoch(epoch); list(s)
const std::vector<Reference>& references() {
  static const std::vector<Reference> table{
      // clang-format off
      {10, 4, false, 0, 0, false, {{0, 4, 8}, {1, 5, 9}, {2, 6, 0}, {3, 7, 1}}},
      {10, 4, true, 0, 0, false, {{4, 3, 6}, {1, 9, 2}, {7, 0, 4}, {5, 8, 1}}},
      {10, 4, true, 0, 1, false, {{5, 0, 7}, {6, 8, 4}, {1, 9, 5}, {2, 3, 6}}},
      {10, 4, true, 3, 2, false, {{1, 3, 8}, {4, 5, 7}, {9, 0, 1}, {6, 2, 4}}},
      {10, 4, true, 0, 5, false, {{1, 3, 8}, {4, 5, 7}, {9, 0, 1}, {6, 2, 4}}},
      {10, 4, false, 0, 0, true, {{0, 4}, {1, 5}, {2, 6}, {3, 7}}},
      {10, 4, true, 0, 0, true, {{4, 3}, {1, 9}, {7, 0}, {5, 8}}},
      {10, 4, true, 0, 1, true, {{5, 0}, {6, 8}, {1, 9}, {2, 3}}},
      {8, 2, true, 0, 0, false, {{4, 7, 2, 1}, {0, 3, 5, 6}}},
      {8, 2, true, 0, 1, false, {{5, 2, 7, 1}, {4, 6, 3, 0}}},
      {8, 2, true, 0, 2, false, {{0, 7, 6, 1}, {4, 2, 5, 3}}},
      {9, 3, true, 42, 7, false, {{2, 8, 3}, {6, 5, 7}, {1, 4, 0}}},
      {9, 3, true, 42, 7, true, {{2, 8, 3}, {6, 5, 7}, {1, 4, 0}}},
      {7, 1, true, 0, 0, false, {{4, 0, 5, 3, 2, 6, 1}}},
      {7, 1, true, 0, 0, true, {{4, 0, 5, 3, 2, 6, 1}}},
      {3, 8, false, 0, 0, false, {{0}, {1}, {2}, {0}, {1}, {2}, {0}, {1}}},
      {3, 8, true, 1, 1, false, {{0}, {2}, {1}, {0}, {2}, {1}, {0}, {2}}},
      {3, 8, true, 1, 1, true, {{}, {}, {}, {}, {}, {}, {}, {}}},
      {1, 4, true, 0, 0, false, {{0}, {0}, {0}, {0}}},
      {0, 3, true, 0, 0, false, {{}, {}, {}}},
      {0, 3, true, 0, 0, true, {{}, {}, {}}},
      {6, 2, true, -1, 0, false, {{3, 2, 1}, {4, 0, 5}}},
      {6, 2, true, -5, 2, false, {{3, 0, 5}, {1, 4, 2}}},
      {6, 2, true, -2, 2, false, {{2, 3, 1}, {5, 0, 4}}},
      {6, 2, true, 2147483648, 0, false, {{4, 3, 1}, {2, 5, 0}}},
      {6, 2, true, 1099511627793, 3, false, {{5, 0, 3}, {1, 4, 2}}},
      {6, 2, true, 9223372036854775807, 4, false, {{4, 3, 1}, {0, 2, 5}}},
      {6, 2, true, std::numeric_limits<std::int64_t>::min(), 0, false, {{2, 3, 1}, {5, 0, 4}}},
      // clang-format on
  };
  return table;
}

/// Examples that are their own index.
class Numbers : public torch::data::datasets::BatchDataset<Numbers, torch::Tensor> {
 public:
  explicit Numbers(std::size_t size) : size_(size) {}
  torch::Tensor get_batch(c10::ArrayRef<std::size_t> indices) override {
    return torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

/// What a program sees of its data: the indices of each of three epochs.
std::vector<Indices> three_epochs(int rank, int num_replicas, std::size_t workers) {
  Numbers dataset(8);
  ddp::DistributedSampler sampler(dataset.size().value(), share(rank, num_replicas));
  auto loader = torch::data::make_data_loader(
      std::move(dataset), sampler, torch::data::DataLoaderOptions().batch_size(4).workers(workers));
  std::vector<Indices> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    auto& seen = epochs.emplace_back();
    for (const auto& batch : *loader) {
      const auto* numbers = batch.const_data_ptr<std::int64_t>();
      seen.insert(seen.end(), numbers, numbers + batch.numel());
    }
  }
  return epochs;
}

TEST_CASE("DistributedSampler gives Python's indices", "[sampler]") {
  for (const auto& reference : references()) {
    for (int rank = 0; rank < reference.num_replicas; ++rank) {
      CAPTURE(reference.size, reference.num_replicas, rank, reference.shuffle, reference.seed,
              reference.epoch, reference.drop_last);
      ddp::DistributedSampler sampler(reference.size, share(rank, reference.num_replicas)
                                                          .shuffle(reference.shuffle)
                                                          .seed(reference.seed)
                                                          .drop_last(reference.drop_last));
      sampler.set_epoch(reference.epoch);
      const auto& expected = reference.expected.at(static_cast<std::size_t>(rank));
      CHECK(sampler.size() == expected.size());
      CHECK(rest_of_epoch(sampler, 2) == expected);
      sampler.reset();
      CHECK(rest_of_epoch(sampler, 64) == expected);
    }
  }
}

TEST_CASE("DistributedSampler gives Python's indices of a dataset as large as MNIST", "[sampler]") {
  ddp::DistributedSampler sampler(60001, share(1, 2).seed(7));
  sampler.set_epoch(1);
  const auto indices = rest_of_epoch(sampler, 64);
  REQUIRE(indices.size() == 30001);
  CHECK(Indices(indices.begin(), indices.begin() + 8) ==
        Indices{36149, 19412, 31171, 25222, 4816, 21340, 53405, 38112});
  CHECK(Indices(indices.end() - 4, indices.end()) == Indices{29842, 18421, 55085, 28202});
  std::uint64_t weighted_sum = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    weighted_sum += i * indices[i];
  }
  CHECK(weighted_sum == 13488832541652);
}

TEST_CASE("through a data loader, ranks share each epoch and epochs differ", "[sampler]") {
  const std::size_t workers = GENERATE(0, 2);
  CAPTURE(workers);
  const auto first = three_epochs(0, 2, workers);
  const auto second = three_epochs(1, 2, workers);
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    CAPTURE(epoch);
    std::set<std::size_t> both(first[epoch].begin(), first[epoch].end());
    both.insert(second[epoch].begin(), second[epoch].end());
    CHECK(first[epoch].size() == 4);
    CHECK(second[epoch].size() == 4);
    CHECK(both.size() == 8);
  }
  CHECK(first[0] != first[1]);
  CHECK(first[1] != first[2]);
  CHECK(first[0] == Indices{4, 7, 2, 1});  // Python's
  CHECK(three_epochs(0, 2, workers) == first);
  CHECK(three_epochs(1, 2, workers) == second);
}

TEST_CASE("set_epoch takes effect when the next epoch begins, in every copy", "[sampler]") {
  ddp::DistributedSampler sampler(8, share(0, 2));
  auto copy = sampler;
  auto moved = std::move(sampler);
  copy.reset();
  moved.reset();
  CHECK(copy.next(2) == Indices{4, 7});
  sampler.set_epoch(1);  // NOLINT(bugprone-use-after-move): stays valid, as documented
  CHECK(copy.epoch() == 1);
  CHECK(copy.next(2) == Indices{2, 1});
  copy.reset();
  CHECK(rest_of_epoch(copy, 8) == Indices{5, 2, 7, 1});
  CHECK(rest_of_epoch(moved, 8) == Indices{4, 7, 2, 1});
}

TEST_CASE("reset takes a new size", "[sampler]") {
  ddp::DistributedSampler sampler(8, share(1, 2).shuffle(false));
  sampler.reset(3);
  CHECK(sampler.size() == 2);
  CHECK(rest_of_epoch(sampler, 1) == Indices{1, 0});
  CHECK_FALSE(sampler.next(1).has_value());
}

TEST_CASE("without a process group the one process gets every example", "[sampler]") {
  ddp::DistributedSampler sampler(5);
  CHECK(sampler.options().num_replicas() == 1);
  CHECK(sampler.options().rank() == 0);
  CHECK(sampler.size() == 5);
  auto indices = rest_of_epoch(sampler, 2);
  std::sort(indices.begin(), indices.end());
  CHECK(indices == Indices{0, 1, 2, 3, 4});
}

TEST_CASE("a sampler continues from an archive", "[sampler]") {
  ddp::DistributedSampler sampler(10, share(0, 2));
  sampler.set_epoch(3);
  CHECK(sampler.next(2).has_value());
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  const auto remaining = rest_of_epoch(sampler, 2);
  REQUIRE(remaining.size() == 3);

  torch::serialize::InputArchive in;
  in.load_from(file);
  ddp::DistributedSampler restored(10, share(0, 2));
  restored.load(in);
  CHECK(restored.epoch() == 3);
  CHECK(rest_of_epoch(restored, 2) == remaining);

  ddp::DistributedSampler smaller(2, share(0, 2));
  CHECK_THROWS_WITH(smaller.load(in), contains("the archive's position is 2, but an epoch has 1 "
                                               "examples here"));
}

TEST_CASE("a bad combination of options is a usage error", "[sampler]") {
  CHECK_THROWS_WITH(ddp::DistributedSampler(8, share(2, 2)),
                    contains("DistributedSampler: rank 2 of num_replicas 2; expected at least one "
                             "replica"));
  CHECK_THROWS_AS(ddp::DistributedSampler(8, share(-1, 2)), ddp::UsageError);
  CHECK_THROWS_AS(ddp::DistributedSampler(8, share(0, 0)), ddp::UsageError);
  // Without a process group, half of the pair leaves the other half to guesses.
  CHECK_THROWS_AS(ddp::DistributedSampler(8, ddp::DistributedSamplerOptions().rank(0)),
                  ddp::UsageError);
  CHECK_THROWS_WITH(ddp::DistributedSampler(8, ddp::DistributedSamplerOptions().rank(0)),
                    contains("DistributedSampler: rank is given but num_replicas is not, and there "
                             "is no process group"));
  CHECK_THROWS_WITH(ddp::DistributedSampler(8, ddp::DistributedSamplerOptions().num_replicas(2)),
                    contains("DistributedSampler: num_replicas is given but rank is not, and there "
                             "is no process group"));
}

}  // namespace
