#include <time.h>

#include <algorithm>
#include <csignal>

#include <fmt/format.h>

#include <launcher/report.h>
#include <launcher/root_cause.h>
#include <launcher/signals.h>

namespace ddp::launcher {
namespace {

/// Hundreds of workers end alike when one fails: the first few tell enough.
constexpr size_t kMostListed = 16;

std::string clock_time(std::chrono::system_clock::time_point time) {
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch());
  const time_t seconds = static_cast<time_t>(since_epoch.count() / 1000);
  tm local{};
  ::localtime_r(&seconds, &local);
  char text[32];
  ::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local);
  return fmt::format("{}.{:03}", text, since_epoch.count() % 1000);
}

std::string indented(const std::string& text) {
  std::string result;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    result.append("      ").append(text, begin, end - begin).push_back('\n');
    begin = end + 1;
  }
  return result;
}

std::string describe(const Worker& worker, const std::string& host) {
  const double seconds = std::chrono::duration<double>(worker.ended - worker.started).count();
  std::string text = fmt::format(
      "  rank {} (local rank {}, pid {}, host {}) {}\n    started {}, ended {} (after {:.3f} s)\n",
      worker.rank, worker.local_rank, worker.pid, host, describe_end(worker),
      clock_time(worker.started), clock_time(worker.ended), seconds);
  if (!worker.error_text.empty()) {
    const std::string when =
        worker.error_time ? fmt::format(", at {}", clock_time(worker.error_time->earliest)) : "";
    text += fmt::format("    it said{}:\n{}", when, indented(worker.error_text));
  }
  for (const std::string& file : worker.files) text += fmt::format("    see {}\n", file);
  return text;
}

template <typename Predicate>
std::string list(const std::vector<Worker>& workers, const char* heading, Predicate wanted) {
  std::string text;
  size_t count = 0;
  for (const Worker& worker : workers) {
    if (!wanted(worker) || ++count > kMostListed) continue;
    text += fmt::format("  rank {} (local rank {}, pid {}) {}\n", worker.rank, worker.local_rank,
                        worker.pid, describe_end(worker));
  }
  if (count == 0) return {};
  if (count > kMostListed) text += fmt::format("  and {} more\n", count - kMostListed);
  return fmt::format("{}\n{}", heading, text);
}

}  // namespace

std::string describe_end(const Worker& worker) {
  switch (worker.end) {
    case Worker::End::kRunning:
      return "is still running";
    case Worker::End::kExited:
      return fmt::format("exited with code {}", worker.code);
    case Worker::End::kSignaled:
      break;
  }
  if (worker.told_to_end) {
    return fmt::format("left an error, and was then stopped by the launcher ({})",
                       signal_name(worker.code));
  }
  return fmt::format("was killed by {}{}", signal_name(worker.code),
                     worker.core_dumped ? " (core dumped)" : "");
}

std::string failure_report(const std::vector<Worker>& workers, const std::vector<size_t>& failures,
                           const std::string& host, const std::string& program,
                           const std::string& ending) {
  const Worker& first = workers.at(failures.at(0));
  std::string text = fmt::format("{} failed: rank {} {}\nroot cause:\n{}", program, first.rank,
                                 describe_end(first), describe(first, host));
  if (first.end == Worker::End::kSignaled && first.code == SIGKILL && !first.told_to_end) {
    text +=
        "    nobody asked the launcher for this: it may be the kernel, out of memory (see dmesg)\n";
  }
  if (failures.size() > 1) {
    text += "failed as well before the launcher stopped the others:\n";
    for (size_t i = 1; i < std::min(failures.size(), kMostListed + 1); ++i) {
      text += describe(workers.at(failures[i]), host);
    }
    if (failures.size() > kMostListed + 1) {
      text += fmt::format("  and {} more\n", failures.size() - kMostListed - 1);
    }
  }
  text += list(workers,
               "stopped by the launcher after that:", [](const Worker& w) { return w.stopped; });
  return text + (ending.empty() ? fmt::format("exit status: {}", failure_status(workers, failures))
                                : ending);
}

std::string stop_report(const std::vector<Worker>& workers, const std::string& why, int status) {
  std::string text = why + "\n";
  text += list(workers,
               "the workers were told, and ended so:", [](const Worker& w) { return w.stopped; });
  text += list(workers, "had ended before:", [](const Worker& w) { return !w.stopped; });
  text += fmt::format("exit status: {}", status);
  return text;
}

}  // namespace ddp::launcher
