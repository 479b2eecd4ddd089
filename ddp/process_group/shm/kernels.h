#pragma once

#include <cstddef>
#include <vector>

#include <ddp/process_group/shm/data_type.h>

namespace ddp::shm {

/// Combines `elements` elements of `sources` in the order of the list, and writes the result into
/// every one of `targets`. A target may be one of the sources, and overlaps nothing else.
/// `scale`: what an average multiplies by.
///
/// Half-precision types are combined in single precision and rounded once. A NaN in one source is a
/// NaN in the result, also of a minimum or maximum. Integers wrap around. Bools: sum, maximum and
/// BOR are "or"; product, minimum and BAND "and".
///
/// The bits of the result depend on the sources alone, neither on `targets`, nor on alignment, nor
/// on how a message is split into calls.
using Reduce = void (*)(const void* const* sources, int source_count, void* const* targets,
                        int target_count, std::size_t elements, double scale);

/// The kernels for one instruction set.
class Kernels {
 public:
  using Table = Reduce[kReducibleTypes][kOps];

  constexpr Kernels(const char* name, const Table& table) : name_(name), table_(table) {}

  const char* name() const { return name_; }
  /// Null for what cannot be combined like this.
  Reduce find(DataType type, Op op) const {
    return type == DataType::kOther ? nullptr
                                    : table_[static_cast<int>(type)][static_cast<int>(op)];
  }

 private:
  const char* name_;
  const Table& table_;
};

/// All that this processor can run, the best one first.
const std::vector<Kernels>& kernels();

}  // namespace ddp::shm
