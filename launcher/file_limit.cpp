#include <dirent.h>

#include <algorithm>
#include <memory>

#include <launcher/file_limit.h>

namespace ddp::launcher {
namespace {

/// For /proc and the like, while processes are ended.
constexpr size_t kSpare = 16;
/// More is of no use, and some systems have no limit at all.
constexpr rlim_t kMost = 1 << 20;

size_t open_files() {
  size_t count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (folder == nullptr) return 0;
  while (::readdir(folder.get()) != nullptr) ++count;
  return count;
}

}  // namespace

FileLimit::FileLimit() {
  ::getrlimit(RLIMIT_NOFILE, &original_);
  rlimit raised = original_;
  raised.rlim_cur = std::max(original_.rlim_cur, std::min(original_.rlim_max, kMost));
  if (::setrlimit(RLIMIT_NOFILE, &raised) != 0) raised = original_;
  limit_ = static_cast<size_t>(std::min(raised.rlim_cur, kMost));
}

size_t FileLimit::available() const {
  const size_t used = open_files() + kSpare;
  return limit_ > used ? limit_ - used : 0;
}

}  // namespace ddp::launcher
