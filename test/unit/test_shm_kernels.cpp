#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <test/support/catch2.h>
#include <vector>

#include <ddp/process_group/shm/kernels.h>

// The loops of the shared-memory backend against plain ones, for every instruction set that this
// processor has.

using ddp::shm::DataType;
using ddp::shm::kernels;
using ddp::shm::Op;

namespace {

float from_half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) {
    return mantissa != 0 ? std::nanf("") : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

/// Of all halves the nearest one, of two equally near the one with an even last bit.
std::uint16_t to_half(float value) {
  if (std::isnan(value)) {
    return 0x7E00;
  }
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0F) {
    return sign | 0x7C00;
  }
  std::uint16_t low = 0;
  std::uint16_t high = 0x7BFF;
  while (low < high) {  // the last one that is not above
    const auto middle = static_cast<std::uint16_t>((low + high + 1) / 2);
    (from_half(middle) <= magnitude ? low : high) =
        from_half(middle) <= magnitude ? middle : static_cast<std::uint16_t>(middle - 1);
  }
  const auto next = static_cast<std::uint16_t>(low + 1);
  const float above = next == 0x7C00 ? 65536.0F : from_half(next);
  const float down = magnitude - from_half(low);
  const float up = above - magnitude;
  return sign | (up < down || (up == down && (low & 1) != 0) ? next : low);
}

float from_bfloat16(std::uint16_t bits) {
  const auto wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

std::uint16_t to_bfloat16(float value) {
  if (std::isnan(value)) {
    return 0x7FC0;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto low = static_cast<std::uint16_t>(bits >> 16);
  const auto rest = bits & 0xFFFF;
  return rest > 0x8000 || (rest == 0x8000 && (low & 1) != 0) ? static_cast<std::uint16_t>(low + 1)
                                                             : low;
}

template <class T>
T combine(T a, T b, Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kAverage:
      return static_cast<T>(a + b);
    case Op::kProduct:
      return static_cast<T>(a * b);
    case Op::kMin:
      return b != b || b < a ? b : a;
    case Op::kMax:
      return b != b || a < b ? b : a;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Op::kBitAnd:
        return a & b;
      case Op::kBitOr:
        return a | b;
      case Op::kBitXor:
        return a ^ b;
      default:
        break;
    }
  }
  return a;
}

/// One element of the result; `read` and `write` are between memory and what is combined.
template <class Value, class Read, class Write>
void reference(const std::vector<const std::byte*>& sources, std::byte* out, Op op, Read read,
               Write write) {
  Value sum = read(sources[0]);
  for (std::size_t index = 1; index < sources.size(); ++index) {
    sum = combine<Value>(sum, read(sources[index]), op);
  }
  if (op == Op::kAverage) {
    sum = static_cast<Value>(sum * static_cast<Value>(1.0 / static_cast<double>(sources.size())));
  }
  write(out, sum);
}

template <class Value>
void plain(const std::vector<const std::byte*>& sources, std::byte* out, Op op) {
  reference<Value>(
      sources, out, op,
      [](const std::byte* at) {
        Value value;
        std::memcpy(&value, at, sizeof(value));
        return value;
      },
      [](std::byte* at, Value value) { std::memcpy(at, &value, sizeof(value)); });
}

/// Wraps around without being undefined.
template <class Value, class Unsigned>
void integer(const std::vector<const std::byte*>& sources, std::byte* out, Op op) {
  if (op == Op::kSum || op == Op::kProduct) {
    plain<Unsigned>(sources, out, op);
  } else {
    plain<Value>(sources, out, op);
  }
}

void half(const std::vector<const std::byte*>& sources, std::byte* out, Op op, DataType type) {
  const bool is_half = type == DataType::kHalf;
  reference<float>(
      sources, out, op,
      [is_half](const std::byte* at) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, at, sizeof(bits));
        return is_half ? from_half(bits) : from_bfloat16(bits);
      },
      [is_half](std::byte* at, float value) {
        const auto bits = is_half ? to_half(value) : to_bfloat16(value);
        std::memcpy(at, &bits, sizeof(bits));
      });
}

void expected(DataType type, Op op, const std::vector<const std::byte*>& sources, std::byte* out) {
  switch (type) {
    case DataType::kFloat:
      return plain<float>(sources, out, op);
    case DataType::kDouble:
      return plain<double>(sources, out, op);
    case DataType::kHalf:
    case DataType::kBFloat16:
      return half(sources, out, op, type);
    case DataType::kInt8:
      return integer<std::int8_t, std::uint8_t>(sources, out, op);
    case DataType::kUint8:
      return plain<std::uint8_t>(sources, out, op);
    case DataType::kInt32:
      return integer<std::int32_t, std::uint32_t>(sources, out, op);
    case DataType::kInt64:
      return integer<std::int64_t, std::uint64_t>(sources, out, op);
    case DataType::kBool:
      return plain<std::uint8_t>(sources, out,
                                 op == Op::kSum || op == Op::kMax       ? Op::kBitOr
                                 : op == Op::kProduct || op == Op::kMin ? Op::kBitAnd
                                                                        : op);
    case DataType::kOther:
      return;
  }
}

bool is_nan(DataType type, const std::byte* at) {
  std::uint16_t bits = 0;
  switch (type) {
    case DataType::kFloat: {
      float value = 0;
      std::memcpy(&value, at, sizeof(value));
      return std::isnan(value);
    }
    case DataType::kDouble: {
      double value = 0;
      std::memcpy(&value, at, sizeof(value));
      return std::isnan(value);
    }
    case DataType::kHalf:
      std::memcpy(&bits, at, sizeof(bits));
      return std::isnan(from_half(bits));
    case DataType::kBFloat16:
      std::memcpy(&bits, at, sizeof(bits));
      return std::isnan(from_bfloat16(bits));
    default:
      return false;
  }
}

/// Random bits, so that every kind of number comes up.
std::vector<std::byte> random_bytes(std::size_t count, bool is_bool, std::mt19937& random) {
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(random() & (is_bool ? 1 : 255));
  }
  return bytes;
}

}  // namespace

TEST_CASE("every kernel gives what a plain loop gives, at every size and alignment") {
  std::mt19937 random(7);
  REQUIRE(!kernels().empty());
  for (const auto& set : kernels()) {
    for (int type_number = 0; type_number < ddp::shm::kReducibleTypes; ++type_number) {
      const auto type = static_cast<DataType>(type_number);
      const auto element = size_of(type);
      for (int op_number = 0; op_number < ddp::shm::kOps; ++op_number) {
        const auto op = static_cast<Op>(op_number);
        const auto reduce = set.find(type, op);
        const bool bitwise = op >= Op::kBitAnd;
        CHECK((reduce != nullptr) == (is_floating(type) ? !bitwise : op != Op::kAverage));
        if (reduce == nullptr) {
          continue;
        }
        for (const std::size_t elements : {0, 1, 3, 15, 64, 67, 1000, 2048, 4099}) {
          for (const int ranks : {1, 2, 3, 5}) {
            for (const std::size_t skipped : {0, 1, 7}) {
              const auto shift = skipped * element;
              std::vector<std::vector<std::byte>> memory;
              std::vector<const void*> sources;
              std::vector<void*> targets;
              for (int rank = 0; rank < ranks; ++rank) {
                memory.push_back(
                    random_bytes(elements * element + shift + 64, type == DataType::kBool, random));
              }
              const auto before = memory;
              for (auto& one : memory) {
                sources.push_back(one.data() + shift);
                targets.push_back(one.data() + shift);
              }
              // Into all, into the first, into the last.
              const auto use = (elements + skipped) % 3;
              if (use == 1) {
                targets.resize(1);
              } else if (use == 2) {
                targets = {targets.back()};
              }
              reduce(sources.data(), ranks, targets.data(), static_cast<int>(targets.size()),
                     elements, 1.0 / ranks);
              std::size_t wrong = 0;
              std::byte want[8];
              for (std::size_t i = 0; i < elements; ++i) {
                std::vector<const std::byte*> inputs;
                for (const auto& one : before) {
                  inputs.push_back(one.data() + shift + i * element);
                }
                expected(type, op, inputs, want);
                for (const auto* target : targets) {
                  const auto* got = static_cast<const std::byte*>(target) + i * element;
                  // Which NaN a sum of NaNs is, is the processor's.
                  const bool same = std::memcmp(got, want, element) == 0 ||
                                    (is_nan(type, got) && is_nan(type, want));
                  wrong += same ? 0 : 1;
                }
              }
              for (std::size_t index = 0; index < memory.size(); ++index) {
                // Nothing before or behind is touched.
                wrong += std::memcmp(memory[index].data(), before[index].data(), shift) != 0;
                const auto end = shift + elements * element;
                wrong += std::memcmp(memory[index].data() + end, before[index].data() + end,
                                     memory[index].size() - end) != 0;
              }
              INFO(set.name() << " " << name_of(type) << " " << name_of(op) << ", " << elements
                              << " elements of " << ranks << " ranks, shifted by " << skipped);
              REQUIRE(wrong == 0);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("all instruction sets and all ways to cut a message give the same bits") {
  std::mt19937 random(11);
  constexpr std::size_t kElements = 5000;
  std::normal_distribution<float> normal;
  for (const auto type : {DataType::kFloat, DataType::kHalf, DataType::kBFloat16}) {
    const auto element = size_of(type);
    std::vector<std::vector<std::byte>> memory;
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<std::byte> bytes(kElements * element);
      for (std::size_t i = 0; i < kElements; ++i) {
        const float value = normal(random);
        const auto narrow = type == DataType::kHalf ? to_half(value) : to_bfloat16(value);
        std::memcpy(bytes.data() + i * element,
                    type == DataType::kFloat ? static_cast<const void*>(&value) : &narrow, element);
      }
      memory.push_back(std::move(bytes));
    }
    std::vector<std::vector<std::byte>> results;
    for (const auto& set : kernels()) {
      for (const std::size_t piece : {kElements, std::size_t{64}, std::size_t{7}}) {
        std::vector<std::byte> out(kElements * element);
        for (std::size_t begin = 0; begin < kElements; begin += piece) {
          const void* sources[3];
          for (int rank = 0; rank < 3; ++rank) {
            sources[rank] = memory[rank].data() + begin * element;
          }
          void* target = out.data() + begin * element;
          set.find(type, Op::kAverage)(sources, 3, &target, 1, std::min(piece, kElements - begin),
                                       1.0 / 3);
        }
        results.push_back(std::move(out));
      }
    }
    for (const auto& result : results) {
      CHECK((result == results.front()));
    }
  }
}
