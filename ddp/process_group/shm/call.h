#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <ddp/process_group/shm/mailbox.h>

namespace ddp::shm {

/// What one rank calls: a collective, and its memory. The memory outlives the call.
struct Call {
  Kind kind = Kind::kBarrier;
  DataType type = DataType::kOther;
  Op op = Op::kSum;
  int root = 0;
  /// Elements of `data`; of a reduce-scatter those of `output`, and `data` has as many for each
  /// rank.
  std::size_t count = 0;
  /// The tensor that is worked on in place; of an all-gather and a reduce-scatter the input. Null
  /// for a reduce-scatter from `pieces`.
  std::byte* data = nullptr;
  /// Of a reduce-scatter.
  std::byte* output = nullptr;
  /// One for each rank: the outputs of an all-gather, or the inputs of a reduce-scatter.
  std::vector<std::byte*> pieces;
  /// Bound of the call, from its beginning.
  std::chrono::milliseconds timeout{0};
};

/// The call in words, as "all_reduce(SUM) of 10 elements (Float)".
std::string describe(const Announcement& call);

/// Whether two ranks' calls fit together.
bool fits(const Announcement& one, const Announcement& other);

}  // namespace ddp::shm
