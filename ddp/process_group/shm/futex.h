#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ddp::shm {

/// Sleeps while `word` is `value`, for at most `limit`, and returns whether that was shorter; may
/// return early. Between processes.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                       std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec duration{};
  duration.tv_sec = seconds.count();
  duration.tv_nsec = (limit - seconds).count();
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, &duration,
                 nullptr, 0) == 0 ||
         errno != ETIMEDOUT;
}

/// Wakes all that sleep on `word`, in whatever process.
inline void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
          0);
}

/// What a loop that waits for another core does in each turn.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ddp::shm
