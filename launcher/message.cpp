#include <unistd.h>

#include <cerrno>

#include <launcher/message.h>

namespace ddp::launcher {

std::string message_text(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 64);
  while (!text.empty()) {
    const auto end = text.find('\n');
    out.append("launch: ").append(text.substr(0, end)).push_back('\n');
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return out;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void print_message(std::string_view text) { write_all(STDERR_FILENO, message_text(text)); }

}  // namespace ddp::launcher
