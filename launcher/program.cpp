#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/program.h>

namespace ddp::launcher {
namespace {

/// 0 where `path` is a file that this user may execute, else the errno that says why not.
int check_executable(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (::faccessat(AT_FDCWD, path.c_str(), X_OK, AT_EACCESS) != 0) return errno;
  return 0;
}

std::string find_in_path(const std::string& name, std::string* refused) {
  const char* variable = ::getenv("PATH");
  std::string_view folders = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
  while (true) {
    const auto colon = folders.find(':');
    const std::string_view folder = folders.substr(0, colon);
    std::string candidate = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    const int error = check_executable(candidate);
    if (error == 0) return candidate;
    if (error == EACCES && refused->empty()) *refused = candidate;
    if (colon == std::string_view::npos) return {};
    folders.remove_prefix(colon + 1);
  }
}

[[noreturn]] void refuse(const std::string& path, int error) {
  const ExecFailure failure = explain_exec_failure(path, error);
  throw Error(failure.status, failure.text);
}

}  // namespace

ExecFailure explain_exec_failure(const std::string& path, int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR: {
      struct stat status {};
      if (::stat(path.c_str(), &status) == 0) {
        return {ExitStatus::kNotFound,
                fmt::format("cannot run {}: the interpreter that it names is missing", path)};
      }
      return {ExitStatus::kNotFound, fmt::format("cannot run {}: no such file", path)};
    }
    case EISDIR:
      return {ExitStatus::kNotExecutable, fmt::format("cannot run {}: it is a folder", path)};
    case EACCES:
      return {ExitStatus::kNotExecutable,
              fmt::format("cannot run {}: not executable (permission denied); chmod +x may help",
                          path)};
    case ENOEXEC:
      return {ExitStatus::kNotExecutable,
              fmt::format(
                  "cannot run {}: not a program for this machine, nor a script that begins with #!",
                  path)};
    default:
      return {ExitStatus::kNotExecutable,
              fmt::format("cannot run {}: {}", path, std::strerror(error))};
  }
}

void check_script(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) refuse(path, errno);
  if (S_ISDIR(status.st_mode)) refuse(path, EISDIR);
  if (::faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0) {
    throw Error(ExitStatus::kNotExecutable,
                fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  }
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    const int error = check_executable(name);
    if (error != 0) refuse(name, error);
    return name;
  }
  if (name.empty())
    throw Error(ExitStatus::kNotFound, "cannot run '': the program's name is empty");
  std::string refused;
  const std::string found = find_in_path(name, &refused);
  if (!found.empty()) return found;
  const std::string here = "./" + name;
  const int error = check_executable(here);
  if (error == 0) return here;
  if (error != ENOENT) refuse(here, error);
  if (!refused.empty()) refuse(refused, EACCES);
  throw Error(ExitStatus::kNotFound,
              fmt::format("cannot run {}: no such program in PATH or in the current folder", name));
}

}  // namespace ddp::launcher
