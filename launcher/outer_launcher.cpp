#include <ddp/json_quoted.h>

#include <cstdlib>

#include <fmt/format.h>

#include <launcher/environment.h>
#include <launcher/error_file.h>
#include <launcher/json_strings.h>
#include <launcher/message.h>
#include <launcher/outer_launcher.h>
#include <launcher/report.h>

namespace ddp::launcher {

std::string error_content(const std::string& text, std::chrono::system_clock::time_point time) {
  const auto since_epoch =
      std::chrono::floor<std::chrono::microseconds>(time.time_since_epoch()).count();
  return fmt::format(
      "{{\"message\": {{\"message\": {}, \"extraInfo\": {{\"timestamp\": \"{}\", \"timestamp_us\": "
      "\"{}\"}}}}}}",
      ddp::detail::json_quoted(text), since_epoch / 1000000, since_epoch);
}

std::string error_content(const Worker& root_cause, const std::string& content,
                          const std::string& host) {
  if (const auto strings = read_json_strings(content);
      strings && (strings->contains("message") || strings->contains("message.message"))) {
    return content;
  }
  std::string text =
      fmt::format("rank {} (local rank {}, pid {}, host {}) {}", root_cause.rank,
                  root_cause.local_rank, root_cause.pid, host, describe_end(root_cause));
  if (!root_cause.error_text.empty()) text += "\n" + root_cause.error_text;
  return error_content(text, root_cause.ended);
}

void tell_outer_launcher(const std::string& error_content) {
  const char* path = std::getenv(kErrorFileVariable);
  if (path != nullptr && *path != '\0') write_error_file(path, error_content);
}

void say_failure(const std::string& text) {
  print_message(text);
  tell_outer_launcher(error_content(text, std::chrono::system_clock::now()));
}

}  // namespace ddp::launcher
