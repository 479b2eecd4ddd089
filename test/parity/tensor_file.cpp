#include <array>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <test/parity/tensor_file.h>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace ddp::parity {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr std::array<char, 8> kMagic{'D', 'D', 'P', 'T', 'E', 'N', 'S', '1'};

const std::vector<std::pair<std::string, at::ScalarType>>& dtypes() {
  static const std::vector<std::pair<std::string, at::ScalarType>> names{
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"complex64", at::kComplexFloat},
      {"complex128", at::kComplexDouble},
      {"uint8", at::kByte},
      {"int8", at::kChar},
      {"int16", at::kShort},
      {"int32", at::kInt},
      {"int64", at::kLong},
      {"bool", at::kBool},
  };
  return names;
}

std::string name_of(at::ScalarType dtype) {
  for (const auto& [name, type] : dtypes()) {
    if (type == dtype) {
      return name;
    }
  }
  throw std::runtime_error(std::string("a file of tensors cannot hold ") + at::toString(dtype));
}

at::ScalarType dtype_of(const std::string& wanted) {
  for (const auto& [name, type] : dtypes()) {
    if (name == wanted) {
      return type;
    }
  }
  throw std::runtime_error("a file of tensors holds the unknown dtype " + wanted);
}

class Input {
 public:
  explicit Input(const std::string& path) : path_(path), file_(path, std::ios::binary) {}

  void read(void* data, std::size_t size) {
    if (!file_.read(static_cast<char*>(data), static_cast<std::streamsize>(size))) {
      throw std::runtime_error(path_ + " is missing or ends too early");
    }
  }
  template <class Number>
  Number number() {
    Number value;
    read(&value, sizeof(value));
    return value;
  }
  std::string text() {
    std::string value(number<std::uint32_t>(), '\0');
    read(value.data(), value.size());
    return value;
  }
  bool at_end() { return file_.peek() == std::ifstream::traits_type::eof(); }

 private:
  std::string path_;
  std::ifstream file_;
};

}  // namespace

TensorWriter::TensorWriter(const std::string& path) : path_(path), file_(path, std::ios::binary) {
  write(kMagic.data(), kMagic.size());
}

void TensorWriter::add(const std::string& name, const at::Tensor& tensor) {
  const auto plain = tensor.detach().cpu().contiguous();
  write(name);
  write(name_of(plain.scalar_type()));
  const auto dimensions = static_cast<std::uint32_t>(plain.dim());
  write(&dimensions, sizeof(dimensions));
  for (const std::int64_t size : plain.sizes()) {
    write(&size, sizeof(size));
  }
  write(plain.const_data_ptr(), plain.nbytes());
}

void TensorWriter::close() {
  file_.close();
  if (!file_) {
    throw std::runtime_error(path_ + " could not be written");
  }
}

void TensorWriter::write(const void* data, std::size_t size) {
  if (!file_.write(static_cast<const char*>(data), static_cast<std::streamsize>(size))) {
    throw std::runtime_error(path_ + " could not be written");
  }
}

void TensorWriter::write(const std::string& text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  write(&size, sizeof(size));
  write(text.data(), text.size());
}

std::map<std::string, at::Tensor> read_tensors(const std::string& path) {
  Input input(path);
  std::array<char, 8> magic{};
  input.read(magic.data(), magic.size());
  if (magic != kMagic) {
    throw std::runtime_error(path + " is not a file of tensors");
  }
  std::map<std::string, at::Tensor> tensors;
  while (!input.at_end()) {
    auto name = input.text();
    const auto dtype = dtype_of(input.text());
    std::vector<std::int64_t> sizes(input.number<std::uint32_t>());
    for (auto& size : sizes) {
      size = input.number<std::int64_t>();
    }
    auto tensor = at::empty(sizes, dtype);
    input.read(tensor.mutable_data_ptr(), tensor.nbytes());
    if (!tensors.emplace(std::move(name), std::move(tensor)).second) {
      throw std::runtime_error(path + " holds a name twice");
    }
  }
  return tensors;
}

}  // namespace ddp::parity
