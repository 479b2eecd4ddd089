#include <ddp/process_group/shm/data_type.h>

namespace ddp::shm {

std::size_t size_of(DataType type) {
  constexpr std::size_t kSizes[] = {4, 8, 2, 2, 1, 1, 4, 8, 1, 1};
  return kSizes[static_cast<int>(type)];
}

const char* name_of(DataType type) {
  constexpr const char* kNames[] = {"Float", "Double", "Half", "BFloat16", "Char",
                                    "Byte",  "Int",    "Long", "Bool",     "bytes"};
  return kNames[static_cast<int>(type)];
}

const char* name_of(Op op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return kNames[static_cast<int>(op)];
}

}  // namespace ddp::shm
