#include <ddp/process_group/shm/kernel_tables.h>
#include <ddp/process_group/shm/kernels.h>

namespace ddp::shm {
namespace {

std::vector<Kernels> supported() {
  std::vector<Kernels> found;
#ifdef DDP_SHM_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.emplace_back("AVX-512", avx512_table());
  }
  if (has_avx2) {
    found.emplace_back("AVX2", avx2_table());
  }
  found.emplace_back("SSE2", baseline_table());
#else
  found.emplace_back("baseline", baseline_table());
#endif
  return found;
}

}  // namespace

const std::vector<Kernels>& kernels() {
  static const auto* const found = new std::vector<Kernels>(supported());
  return *found;
}

}  // namespace ddp::shm
