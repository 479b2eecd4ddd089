#include <cerrno>
#include <fcntl.h>
#include <linux/falloc.h>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <ddp/process_group/shm/available_memory.h>
#include <ddp/process_group/shm/segment.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {
namespace {

std::string words(int error) { return std::generic_category().message(error); }

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

/// Mapped with its pages present: a page fault would fall into a collective.
std::byte* map(int fd, std::size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

Segment Segment::create(std::size_t bytes) {
  Segment made;
  made.fd_ = memfd_create("ddp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made.fd_ < 0) {
    throw ShmError(
        fmt::format("the system makes no shared memory (memfd_create: {})", words(errno)));
  }
  const auto whole = whole_pages(bytes);
  int failed = whole > available_memory() ? ENOMEM : EINTR;
  while (failed == EINTR) {
    failed = fallocate(made.fd_, 0, 0, static_cast<off_t>(whole)) == 0 ? 0 : errno;
  }
  if (failed == 0) {
    // A peer that could shrink it could let this process die of SIGBUS.
    fcntl(made.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    made.data_ = map(made.fd_, whole);
    failed = made.data_ == nullptr ? errno : 0;
  }
  if (failed != 0) {
    throw ShmError(
        fmt::format("there is no room for {} bytes of shared memory ({})", whole, words(failed)));
  }
  made.bytes_ = whole;
  return made;
}

Segment Segment::attach(pid_t pid, int fd, std::size_t bytes) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    throw ShmError(
        fmt::format("the memory of process {} cannot be opened ({}: {})", pid, path, words(errno)));
  }
  Segment made;
  const auto whole = whole_pages(bytes);
  const off_t end = lseek(opened, 0, SEEK_END);
  if (end == static_cast<off_t>(whole)) {
    made.data_ = map(opened, whole);
  }
  const int error = errno;
  close(opened);
  if (made.data_ == nullptr) {
    throw ShmError(fmt::format("the memory of process {} cannot be mapped ({}: {})", pid, path,
                               end == static_cast<off_t>(whole) ? words(error) : "another file"));
  }
  made.bytes_ = whole;
  return made;
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
  if (fd_ >= 0) {
    close(fd_);
  }
}

void Segment::discard() {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes_));
}

}  // namespace ddp::shm
