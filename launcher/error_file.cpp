#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include <launcher/error_file.h>
#include <launcher/json_strings.h>
#include <launcher/message.h>
#include <launcher/set_aside.h>

namespace ddp::launcher {
namespace {

/// More of a file is not looked at, and more of a text not shown.
constexpr size_t kMostRead = 256 * 1024;
constexpr size_t kMostShown = 4 * 1024;
/// Seconds since 1970 that the clock can still count, in nanoseconds.
constexpr long long kLatest = 9000000000;

/// Other bytes than text could make a terminal do anything.
std::string printable(const std::string& text) {
  // Of a long one the end tells most: there a call stack has its error.
  std::string shown;
  size_t begin = 0;
  if (text.size() > kMostShown) {
    begin = text.size() - kMostShown;
    while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) ++begin;
    shown = "(...) ";
  }
  for (size_t i = begin; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    shown.push_back((byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7f ? '?' : text[i]);
  }
  while (!shown.empty() && (shown.back() == '\n' || shown.back() == ' ')) shown.pop_back();
  return shown;
}

std::string read_bounded(int fd) {
  std::string content;
  content.resize(kMostRead);
  size_t size = 0;
  while (size < content.size()) {
    const ssize_t count =
        ::pread(fd, content.data() + size, content.size() - size, static_cast<off_t>(size));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    size += static_cast<size_t>(count);
  }
  content.resize(size);
  return content;
}

}  // namespace

ErrorFiles::ErrorFiles(size_t count) {
  for (size_t i = 0; i < count; ++i) {
    UniqueFd fd(::memfd_create("error", MFD_CLOEXEC));
    paths_.push_back(fd ? fmt::format("/proc/{}/fd/{}", ::getpid(), fd.get()) : "");
    in_memory_.push_back(std::move(fd));
  }
}

ErrorFiles::ErrorFiles(const std::vector<std::string>& folders) {
  for (const std::string& folder : folders) {
    paths_.push_back(folder + "/error.json");
    // A worker runs in the same folder, or changes it.
    if (char* whole = ::realpath(folder.c_str(), nullptr)) {
      paths_.back() = std::string(whole) + "/error.json";
      std::free(whole);
    }
    if (!set_aside(paths_.back())) ::unlink(paths_.back().c_str());
  }
}

std::string ErrorFiles::path_of(size_t worker) const {
  return worker < paths_.size() ? paths_[worker] : std::string();
}

std::string ErrorFiles::content_of(size_t worker) const {
  if (worker >= paths_.size()) return {};
  if (worker < in_memory_.size() && in_memory_[worker])
    return read_bounded(in_memory_[worker].get());
  const UniqueFd fd(::open(paths_[worker].c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  return read_bounded(fd.get());
}

void write_error_file(const std::string& path, const std::string& content) {
  const UniqueFd fd(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC, 0666));
  if (fd) write_all(fd.get(), content);
}

std::optional<Worker::ErrorTime> error_time(const std::string& content) {
  using Time = std::chrono::system_clock::time_point;
  const auto strings = read_json_strings(content);
  if (!strings) return {};
  const auto number = [&](const char* path, long long most) -> std::optional<long long> {
    const auto found = strings->find(path);
    if (found == strings->end()) return {};
    const char* end = found->second.data() + found->second.size();
    long long value = 0;
    const auto [stopped, error] = std::from_chars(found->second.data(), end, value);
    if (error != std::errc{} || stopped != end || value < 0 || value > most) return {};
    return value;
  };
  if (const auto exact = number("message.extraInfo.timestamp_us", kLatest * 1000000)) {
    const Time time{std::chrono::microseconds(*exact)};
    return Worker::ErrorTime{time, time};
  }
  if (const auto second = number("message.extraInfo.timestamp", kLatest)) {
    const Time time{std::chrono::seconds(*second)};
    return Worker::ErrorTime{time, time + std::chrono::seconds(1)};
  }
  return {};
}

std::string error_text(const std::string& content) {
  const auto strings = read_json_strings(content);
  if (!strings) return printable(content);
  const auto get = [&](const char* path) {
    const auto found = strings->find(path);
    return found == strings->end() ? std::string() : found->second;
  };
  std::string message = get("message.message");
  if (message.empty()) message = get("message");
  const std::string stack = get("message.extraInfo.py_callstack");
  // A Python call stack ends with the message.
  if (stack.find(message) != std::string::npos)
    message = stack;
  else if (!stack.empty())
    message += "\n" + stack;
  return printable(message.empty() ? content : message);
}

}  // namespace ddp::launcher
