#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include <launcher/set_aside.h>

namespace ddp::launcher {
namespace {

bool is_regular(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

/// Renames without ever replacing a file.
bool rename_to_free(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS) return false;
  // A file system without it, as NFS.
  return ::link(from.c_str(), to.c_str()) == 0 && ::unlink(from.c_str()) == 0;
}

}  // namespace

bool set_aside(const std::string& path) {
  for (int number = 1; is_regular(path); ++number) {
    if (!rename_to_free(path, path + "." + std::to_string(number)) && errno != EEXIST &&
        errno != ENOENT) {
      return false;
    }
  }
  return true;
}

UniqueFd create_file(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
  while (true) {
    if (!set_aside(path)) return {};
    UniqueFd fd(::open(path.c_str(), kFlags | O_EXCL, 0666));
    if (fd || errno != EEXIST) return fd;
    // Another run was quicker, or something that is no regular file lies there.
    if (!is_regular(path)) return UniqueFd(::open(path.c_str(), kFlags, 0666));
  }
}

}  // namespace ddp::launcher
