// The kernels' loops, for the sources kernels_*.cpp alone: each of these compiles them for one
// instruction set. Everything is in an unnamed namespace, and nothing of the standard library is
// called: a function that the linker shares between the sources could else come from the one with
// the newest instructions, and run on a processor without them.

#include <cstddef>
#include <cstdint>

#include <ddp/process_group/shm/kernels.h>

// The sources of a loop are its targets, or lie elsewhere: no iteration reads what another wrote.
#if defined(__clang__)
#define DDP_SHM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define DDP_SHM_INDEPENDENT _Pragma("GCC ivdep")
#else
#define DDP_SHM_INDEPENDENT
#endif

namespace ddp::shm {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

/// A type as it lies in memory, and as what it is combined in.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T load(T stored) { return stored; }
  static T store(T value) { return value; }
};

/// Integers are added and multiplied without a sign, where wrapping around is defined.
template <class T, class Unsigned>
struct Integer : Plain<T> {
  using Arithmetic = Unsigned;
};

struct Half {
  using Stored = std::uint16_t;
  using Value = float;
  // Both after Marat Dukhan's FP16, without branches so that they vectorise.
  static float load(std::uint16_t stored) {
    const std::uint32_t w = static_cast<std::uint32_t>(stored) << 16;
    const std::uint32_t sign = w & 0x80000000U;
    const std::uint32_t two_w = w + w;
    const float normal = float_of((two_w >> 4) + (0xE0U << 23)) * 0x1.0p-112F;
    const float subnormal = float_of((two_w >> 17) | (126U << 23)) - 0.5F;
    const std::uint32_t magnitude = two_w < (1U << 27) ? bits_of(subnormal) : bits_of(normal);
    return float_of(sign | magnitude);
  }
  static std::uint16_t store(float value) {
    const std::uint32_t w = bits_of(value);
    const std::uint32_t two_w = w + w;
    const std::uint32_t sign = w & 0x80000000U;
    const float magnitude = float_of(w & 0x7FFFFFFFU);
    const std::uint32_t exponent = two_w & 0xFF000000U;
    const std::uint32_t bias = exponent < 0x71000000U ? 0x71000000U : exponent;
    const float base = float_of((bias >> 1) + 0x07800000U) + magnitude * 0x1.0p+112F * 0x1.0p-110F;
    const std::uint32_t bits = bits_of(base);
    const std::uint32_t unsigned_half = ((bits >> 13) & 0x7C00U) + (bits & 0x0FFFU);
    return static_cast<std::uint16_t>((sign >> 16) |
                                      (two_w > 0xFF000000U ? 0x7E00U : unsigned_half));
  }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static float load(std::uint16_t stored) {
    return float_of(static_cast<std::uint32_t>(stored) << 16);
  }
  static std::uint16_t store(float value) {
    const std::uint32_t w = bits_of(value);
    const std::uint32_t rounded = (w + 0x7FFFU + ((w >> 16) & 1U)) >> 16;
    return static_cast<std::uint16_t>((w & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
  }
};

struct Bool : Plain<std::uint8_t> {};

template <class Type>
struct Sum {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
template <class T, class Unsigned>
struct Sum<Integer<T, Unsigned>> {
  static T of(T a, T b) {
    return static_cast<T>(
        static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  }
};

template <class Type>
struct Product {
  template <class T>
  static T of(T a, T b) {
    return a * b;
  }
};
template <class T, class Unsigned>
struct Product<Integer<T, Unsigned>> {
  static T of(T a, T b) {
    return static_cast<T>(
        static_cast<Unsigned>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b)));
  }
};

template <class Type>
struct Min {
  template <class T>
  static T of(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
};
template <class Type>
struct Max {
  template <class T>
  static T of(T a, T b) {
    return (a < b) | (b != b) ? b : a;
  }
};

template <class Type>
struct And {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
template <class Type>
struct Or {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
template <class Type>
struct Xor {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

/// Elements that are combined before they are written out: they stay in the first-level cache.
constexpr std::size_t kBlock = 2048;

template <class Type, class Operation, bool kScaled>
void reduce(const void* const* sources, int source_count, void* const* targets, int target_count,
            std::size_t elements, double scale_or_one) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  const auto scale = static_cast<Value>(scale_or_one);
  const auto scaled = [scale](Value value) {
    return kScaled ? static_cast<Value>(value * scale) : value;
  };
  const auto source = [sources](int index) { return static_cast<const Stored*>(sources[index]); };
  const auto target = [targets](int index) { return static_cast<Stored*>(targets[index]); };
  if (source_count == 2 && target_count <= 2) {
    const Stored* a = source(0);
    const Stored* b = source(1);
    Stored* x = target(0);
    if (target_count == 1) {
      DDP_SHM_INDEPENDENT
      for (std::size_t i = 0; i < elements; ++i) {
        x[i] = Type::store(scaled(Operation::of(Type::load(a[i]), Type::load(b[i]))));
      }
      return;
    }
    Stored* y = target(1);
    DDP_SHM_INDEPENDENT
    for (std::size_t i = 0; i < elements; ++i) {
      const Stored result = Type::store(scaled(Operation::of(Type::load(a[i]), Type::load(b[i]))));
      x[i] = result;
      y[i] = result;
    }
    return;
  }
  alignas(64) Value sums[kBlock];
  for (std::size_t begin = 0; begin < elements; begin += kBlock) {
    const std::size_t count = elements - begin < kBlock ? elements - begin : kBlock;
    const Stored* first = source(0) + begin;
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = Type::load(first[i]);
    }
    for (int index = 1; index < source_count; ++index) {
      const Stored* next = source(index) + begin;
      for (std::size_t i = 0; i < count; ++i) {
        sums[i] = Operation::of(sums[i], Type::load(next[i]));
      }
    }
    for (int index = 0; index < target_count; ++index) {
      Stored* out = target(index) + begin;
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = Type::store(scaled(sums[i]));
      }
    }
  }
}

#define DDP_SHM_ARITHMETIC(TYPE)                                          \
  reduce<TYPE, Sum<TYPE>, false>, reduce<TYPE, Sum<TYPE>, true>,          \
      reduce<TYPE, Product<TYPE>, false>, reduce<TYPE, Min<TYPE>, false>, \
      reduce<TYPE, Max<TYPE>, false>
#define DDP_SHM_FLOATING(TYPE) \
  { DDP_SHM_ARITHMETIC(TYPE), nullptr, nullptr, nullptr }
#define DDP_SHM_INTEGER(...)                                                                       \
  {                                                                                                \
    reduce<__VA_ARGS__, Sum<__VA_ARGS__>, false>, nullptr,                                         \
        reduce<__VA_ARGS__, Product<__VA_ARGS__>, false>,                                          \
        reduce<__VA_ARGS__, Min<__VA_ARGS__>, false>,                                              \
        reduce<__VA_ARGS__, Max<__VA_ARGS__>, false>,                                              \
        reduce<__VA_ARGS__, And<__VA_ARGS__>, false>, reduce<__VA_ARGS__, Or<__VA_ARGS__>, false>, \
        reduce<__VA_ARGS__, Xor<__VA_ARGS__>, false>                                               \
  }

using Int8 = Integer<std::int8_t, std::uint32_t>;
using Uint8 = Integer<std::uint8_t, std::uint32_t>;
using Int32 = Integer<std::int32_t, std::uint32_t>;
using Int64 = Integer<std::int64_t, std::uint64_t>;

constexpr Kernels::Table kTable = {
    DDP_SHM_FLOATING(Plain<float>),
    DDP_SHM_FLOATING(Plain<double>),
    DDP_SHM_FLOATING(Half),
    DDP_SHM_FLOATING(BFloat16),
    DDP_SHM_INTEGER(Int8),
    DDP_SHM_INTEGER(Uint8),
    DDP_SHM_INTEGER(Int32),
    DDP_SHM_INTEGER(Int64),
    {reduce<Bool, Or<Bool>, false>, nullptr, reduce<Bool, And<Bool>, false>,
     reduce<Bool, And<Bool>, false>, reduce<Bool, Or<Bool>, false>, reduce<Bool, And<Bool>, false>,
     reduce<Bool, Or<Bool>, false>, reduce<Bool, Xor<Bool>, false>},
};

}  // namespace
}  // namespace ddp::shm
