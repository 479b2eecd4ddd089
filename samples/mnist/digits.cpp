#include "digits.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace {

constexpr std::int64_t kSide = 28;
// Mean and standard deviation of MNIST's pixels, as fractions of 255.
constexpr double kMean = 0.1307;
constexpr double kDeviation = 0.3081;

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw std::runtime_error(
      path + ": " + problem +
      ". scripts/bootstrap.sh puts MNIST's files into data/mnist; --data names another folder.");
}

std::int64_t read_big_endian(std::istream& file) {
  std::array<char, 4> bytes{};
  file.read(bytes.data(), bytes.size());
  std::int64_t value = 0;
  for (const char byte : bytes) {
    value = value * 256 + static_cast<unsigned char>(byte);
  }
  return value;
}

/// Reads an IDX file of bytes whose shape is `count` x `item`. The count is the file's to say.
torch::Tensor read_idx(const std::string& path, const std::vector<std::int64_t>& item) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail(path, std::filesystem::exists(path + ".gz") ? "missing; unpack " + path + ".gz with gunzip"
                                                     : "cannot be read");
  }
  // Two zero bytes, the type (8: unsigned bytes), the number of dimensions; then the dimensions.
  std::vector<std::int64_t> shape{0};
  bool is_right = read_big_endian(file) == 0x800 + static_cast<std::int64_t>(item.size()) + 1;
  shape[0] = read_big_endian(file);
  for (const auto expected : item) {
    is_right = read_big_endian(file) == expected && is_right;
    shape.push_back(expected);
  }
  if (!file || !is_right) {
    fail(path, "not an IDX file of " + std::string(item.empty() ? "labels" : "28 x 28 images"));
  }
  const auto header_size = 4 * (2 + item.size());
  const auto announced = header_size + static_cast<std::uintmax_t>(c10::multiply_integers(shape));
  const auto size = std::filesystem::file_size(path);
  if (size != announced) {
    fail(path, "has " + std::to_string(size) + " bytes where its header announces " +
                   std::to_string(announced));
  }
  auto content = torch::empty(shape, torch::kByte);
  if (!file.read(reinterpret_cast<char*>(content.data_ptr<std::uint8_t>()), content.numel())) {
    fail(path, "cannot be read to its end");
  }
  return content;
}

}  // namespace

Digits::Digits(const std::string& folder, Part part) {
  const auto name = folder + (part == Part::kTraining ? "/train" : "/t10k");
  const auto labels_path = name + "-labels-idx1-ubyte";
  images_ = read_idx(name + "-images-idx3-ubyte", {kSide, kSide}).unsqueeze(1);
  labels_ = read_idx(labels_path, {}).to(torch::kLong);
  if (labels_.size(0) != images_.size(0)) {
    fail(labels_path, "has " + std::to_string(labels_.size(0)) + " labels for " +
                          std::to_string(images_.size(0)) + " images");
  }
  if (labels_.numel() == 0 || labels_.max().item<std::int64_t>() > 9) {
    fail(labels_path, labels_.numel() == 0 ? "is empty" : "has labels other than 0 to 9");
  }
}

torch::data::Example<> Digits::get_batch(c10::ArrayRef<std::size_t> indices) {
  const auto chosen = torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  auto images = images_.index_select(0, chosen).to(torch::kFloat);
  return {images.div_(255).sub_(kMean).div_(kDeviation), labels_.index_select(0, chosen)};
}

std::optional<std::size_t> Digits::size() const {
  return static_cast<std::size_t>(labels_.size(0));
}
