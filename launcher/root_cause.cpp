#include <ddp/json_quoted.h>

#include <algorithm>

#include <fmt/format.h>

#include <launcher/json_strings.h>
#include <launcher/report.h>
#include <launcher/root_cause.h>

namespace ddp::launcher {
namespace {

using Time = std::chrono::system_clock::time_point;

/// When a worker failed, as far as is known.
struct Span {
  Time earliest;
  Time latest;
};

Span failure_of(const Worker& worker) {
  // A time that the worker's life does not contain is another one's, or of a clock that was set.
  if (!worker.error_time || worker.error_time->latest < worker.started ||
      worker.error_time->earliest > worker.ended) {
    return {worker.ended, worker.ended};
  }
  return {worker.error_time->earliest, std::min(worker.error_time->latest, worker.ended)};
}

}  // namespace

void order_failures(std::vector<Worker>& workers, std::vector<size_t>& failures,
                    std::chrono::system_clock::time_point stopped_at) {
  if (failures.empty()) return;
  for (size_t i = 0; i < workers.size(); ++i) {
    Worker& worker = workers[i];
    if (!worker.stopped || !worker.failed() || !worker.error_time) continue;
    if (failure_of(worker).latest >= stopped_at) continue;
    worker.stopped = false;
    worker.told_to_end = true;
    failures.push_back(i);
  }
  // Where their order is not sure that of their ends stays.
  auto cause = failures.begin();
  for (auto other = failures.begin() + 1; other != failures.end(); ++other) {
    if (failure_of(workers[*other]).latest < failure_of(workers[*cause]).earliest) cause = other;
  }
  std::rotate(failures.begin(), cause, cause + 1);
}

int failure_status(const std::vector<Worker>& workers, const std::vector<size_t>& failures) {
  const auto own = std::find_if(failures.begin(), failures.end(), [&](size_t index) {
    return !workers[index].told_to_end || workers[index].end == Worker::End::kExited;
  });
  return workers.at(own != failures.end() ? *own : failures.at(0)).status();
}

std::string outer_error(const Worker& root_cause, const std::string& content,
                        const std::string& host) {
  if (const auto strings = read_json_strings(content);
      strings && (strings->contains("message") || strings->contains("message.message"))) {
    return content;
  }
  const auto seconds =
      std::chrono::floor<std::chrono::seconds>(root_cause.ended.time_since_epoch());
  std::string text =
      fmt::format("rank {} (local rank {}, pid {}, host {}) {}", root_cause.rank,
                  root_cause.local_rank, root_cause.pid, host, describe_end(root_cause));
  if (!root_cause.error_text.empty()) text += "\n" + root_cause.error_text;
  return fmt::format(
      "{{\"message\": {{\"message\": {}, \"extraInfo\": {{\"timestamp\": \"{}\"}}}}}}",
      ddp::detail::json_quoted(text), seconds.count());
}

}  // namespace ddp::launcher
