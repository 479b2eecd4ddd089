#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

/// Handwritten digits in MNIST's own files (IDX, unpacked): the full set, or any other number of
/// them. (LibTorch's own MNIST dataset insists on 60,000 and 10,000.)
///
/// It gives whole batches: float images N x 1 x 28 x 28, normalised, and labels 0 to 9. Copies
/// share the memory.
class Digits : public torch::data::datasets::BatchDataset<Digits, torch::data::Example<>> {
 public:
  enum class Part { kTraining, kTest };

  /// Throws std::runtime_error, naming the file, where one is missing or is not what it should be.
  Digits(const std::string& folder, Part part);

  torch::data::Example<> get_batch(c10::ArrayRef<std::size_t> indices) override;
  std::optional<std::size_t> size() const override;

 private:
  torch::Tensor images_;  // bytes
  torch::Tensor labels_;
};
