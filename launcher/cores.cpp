#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include <launcher/cores.h>

namespace ddp::launcher {

int available_cores() {
  // The kernel refuses a set that is smaller than its own: grow until it fits.
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 4) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(capacity),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const size_t size = CPU_ALLOC_SIZE(capacity);
    if (set == nullptr) break;
    CPU_ZERO_S(size, set.get());
    if (sched_getaffinity(0, size, set.get()) == 0) {
      const int count = CPU_COUNT_S(size, set.get());
      return count > 0 ? count : 1;
    }
    if (errno != EINVAL) break;
  }
  const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  return cores > 0 ? static_cast<int>(cores) : 1;
}

}  // namespace ddp::launcher
