#pragma once

#include <fstream>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace ddp::parity {

/// Writes the plain file of named tensors that README.md describes. Throws std::runtime_error.
class TensorWriter {
 public:
  explicit TensorWriter(const std::string& path);
  void add(const std::string& name, const at::Tensor& tensor);
  /// Without it the file may be incomplete.
  void close();

 private:
  void write(const void* data, std::size_t size);
  void write(const std::string& text);

  std::string path_;
  std::ofstream file_;
};

/// The file's tensors by name. Throws std::runtime_error where it is not such a file.
std::map<std::string, at::Tensor> read_tensors(const std::string& path);

}  // namespace ddp::parity
