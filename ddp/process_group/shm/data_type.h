#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp::shm {

/// What the elements of a message are. The kernels do not know `kOther`: such a message can only be
/// moved.
enum class DataType : std::uint8_t {
  kFloat,
  kDouble,
  kHalf,
  kBFloat16,
  kInt8,
  kUint8,
  kInt32,
  kInt64,
  kBool,
  kOther,
};
constexpr int kReducibleTypes = static_cast<int>(DataType::kOther);

/// How elements are combined. `kAverage` is for floating point, the last three for integers.
enum class Op : std::uint8_t {
  kSum,
  kAverage,
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
};
constexpr int kOps = 8;

/// Bytes of an element; 1 for `kOther`, whose messages are counted in bytes.
std::size_t size_of(DataType type);

/// LibTorch's name of the type, as "Float"; "bytes" for `kOther`.
const char* name_of(DataType type);
const char* name_of(Op op);

constexpr bool is_floating(DataType type) { return type <= DataType::kBFloat16; }

}  // namespace ddp::shm
