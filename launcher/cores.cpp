#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include <launcher/cores.h>

namespace ddp::launcher {

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  // The kernel refuses a set that is smaller than its own: grow until it fits.
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 4) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(capacity),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const size_t size = CPU_ALLOC_SIZE(capacity);
    if (set == nullptr) break;
    CPU_ZERO_S(size, set.get());
    if (sched_getaffinity(0, size, set.get()) == 0) {
      for (int core = 0; core < capacity; ++core) {
        if (CPU_ISSET_S(static_cast<size_t>(core), size, set.get())) cores.push_back(core);
      }
      return cores;
    }
    if (errno != EINVAL) break;
  }
  const long count = ::sysconf(_SC_NPROCESSORS_ONLN);
  for (int core = 0; core < std::max(1L, count); ++core) cores.push_back(core);
  return cores;
}

int available_cores() { return static_cast<int>(allowed_cores().size()); }

}  // namespace ddp::launcher
