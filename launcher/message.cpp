#include <unistd.h>

#include <cerrno>
#include <string>

#include <launcher/message.h>

namespace ddp::launcher {

void print_message(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 64);
  while (!text.empty()) {
    const auto end = text.find('\n');
    out.append("launch: ").append(text.substr(0, end)).push_back('\n');
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  const char* data = out.data();
  size_t left = out.size();
  while (left > 0) {
    const ssize_t written = ::write(STDERR_FILENO, data, left);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    data += written;
    left -= static_cast<size_t>(written);
  }
}

}  // namespace ddp::launcher
