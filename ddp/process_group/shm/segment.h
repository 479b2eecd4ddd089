#pragma once

#include <cstddef>
#include <cstdint>
#include <sys/types.h>

namespace ddp::shm {

/// Shared memory without a name, mapped into this process. Other processes of the same user open it
/// by this process's number and the descriptor's; it is gone with the last process that has it,
/// however that ends. Its pages are reserved when it is made: a full machine is an error then, and
/// never a SIGBUS later.
///
/// Movable. Not thread-safe.
class Segment {
 public:
  Segment() = default;
  /// Makes one of at least `bytes`, filled with zeros. Throws ShmError.
  static Segment create(std::size_t bytes);
  /// Maps the one that process `pid` has as its descriptor `fd`. Throws ShmError.
  static Segment attach(pid_t pid, int fd, std::size_t bytes);
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// The descriptor of a segment made by this process; -1 for one that was attached.
  int fd() const { return fd_; }

  /// Gives the pages back to the system, also where other processes still map them.
  void discard();

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace ddp::shm
