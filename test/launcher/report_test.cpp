// The report's text, and what it is made of.

#include <signal.h>
#include <sys/wait.h>

#include <string>
#include <vector>

#include <launcher/report.h>
#include <launcher/signals.h>
#include <launcher/worker.h>

#include "catch2.h"

using namespace ddp::launcher;

namespace {

constexpr int kCoreFlag = 0x80;  // of a wait status

Worker ended(int rank, int wait_status, bool stopped) {
  Worker worker;
  worker.rank = rank;
  worker.local_rank = rank % 8;
  worker.pid = 1000 + rank;
  worker.started = std::chrono::system_clock::now() - std::chrono::milliseconds(1500);
  worker.ended_with(wait_status);
  worker.stopped = stopped;
  return worker;
}

}  // namespace

TEST_CASE("a worker's end is read from its wait status") {
  const Worker fine = ended(0, W_EXITCODE(0, 0), false);
  CHECK_FALSE(fine.failed());
  CHECK(fine.status() == 0);
  const Worker code = ended(0, W_EXITCODE(7, 0), false);
  CHECK(code.failed());
  CHECK(code.status() == 7);
  CHECK(describe_end(code) == "exited with code 7");
  const Worker killed = ended(0, W_EXITCODE(0, SIGSEGV), false);
  CHECK(killed.failed());
  CHECK(killed.status() == 139);
  CHECK(describe_end(killed) == "was killed by SIGSEGV");
  CHECK(describe_end(ended(0, SIGABRT | kCoreFlag, false)) ==
        "was killed by SIGABRT (core dumped)");
}

TEST_CASE("signals have names") {
  CHECK(signal_name(SIGKILL) == "SIGKILL");
  CHECK(signal_name(SIGBUS) == "SIGBUS");
  CHECK(signal_name(64) == "signal 64");
}

TEST_CASE("the report shows the root cause first and who was only stopped last") {
  const std::vector<Worker> workers = {
      ended(8, W_EXITCODE(0, SIGTERM), true), ended(9, W_EXITCODE(0, SIGSEGV), false),
      ended(10, W_EXITCODE(4, 0), false), ended(11, W_EXITCODE(0, 0), false)};
  const std::string report = failure_report(workers, {2, 1}, "node7", "./train");
  INFO(report);
  const auto cause = report.find("rank 10 (local rank 2, pid 1010, host node7) exited with code 4");
  const auto other =
      report.find("rank 9 (local rank 1, pid 1009, host node7) was killed by SIGSEGV");
  const auto stopped = report.find("rank 8 (local rank 0, pid 1008) was killed by SIGTERM");
  REQUIRE(cause != std::string::npos);
  REQUIRE(other != std::string::npos);
  REQUIRE(stopped != std::string::npos);
  CHECK(report.find("root cause:") < cause);
  CHECK(cause < report.find("failed as well"));
  CHECK(report.find("failed as well") < other);
  CHECK(other < report.find("stopped by the launcher"));
  CHECK(report.find("stopped by the launcher") < stopped);
  CHECK_THAT(report, ContainsSubstring("./train failed: rank 10 exited with code 4\n"));
  CHECK_THAT(report, ContainsSubstring("started "));
  CHECK_THAT(report, ContainsSubstring("ended "));
  CHECK_THAT(report, ContainsSubstring("after 1.5"));
  CHECK_THAT(report, ContainsSubstring("exit status: 4"));
  CHECK_THAT(report, !ContainsSubstring("rank 11"));
}

TEST_CASE("a worker killed by SIGKILL from outside gets a hint") {
  const std::vector<Worker> workers = {ended(0, W_EXITCODE(0, SIGKILL), false)};
  CHECK_THAT(failure_report(workers, {0}, "h", "p"), ContainsSubstring("out of memory"));
}

TEST_CASE("the report has what the worker said, and its files") {
  std::vector<Worker> workers = {ended(0, W_EXITCODE(1, 0), false)};
  workers[0].error_text = "ValueError: no\n  at line 3";
  workers[0].files = {"/logs/0/stdout.log", "/logs/0/stderr.log"};
  const std::string report = failure_report(workers, {0}, "h", "p", "the last line");
  CHECK_THAT(report, ContainsSubstring("it said:\n      ValueError: no\n        at line 3\n"));
  CHECK_THAT(report, ContainsSubstring("see /logs/0/stderr.log"));
  CHECK_THAT(report, ContainsSubstring("the last line"));
  CHECK_THAT(report, !ContainsSubstring("exit status"));
}

TEST_CASE("hundreds of stopped workers do not drown the cause") {
  std::vector<Worker> workers = {ended(0, W_EXITCODE(1, 0), false)};
  for (int rank = 1; rank < 512; ++rank)
    workers.push_back(ended(rank, W_EXITCODE(0, SIGTERM), true));
  const std::string report = failure_report(workers, {0}, "h", "p");
  CHECK_THAT(report, ContainsSubstring("and 495 more"));
  CHECK(report.size() < 3000);
}

TEST_CASE("a job that was stopped has no root cause") {
  const std::vector<Worker> workers = {ended(0, W_EXITCODE(0, 0), true),
                                       ended(1, W_EXITCODE(3, 0), true)};
  const std::string report = stop_report(workers, "stopped by SIGTERM", 143);
  CHECK_THAT(report, ContainsSubstring("stopped by SIGTERM"));
  CHECK_THAT(report, ContainsSubstring("rank 1 (local rank 1, pid 1001) exited with code 3"));
  CHECK_THAT(report, ContainsSubstring("exit status: 143"));
  CHECK_THAT(report, !ContainsSubstring("root cause"));
}
