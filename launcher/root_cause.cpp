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

}  // namespace ddp::launcher
