// Who failed first, by the times in the error files and by the ends.

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <vector>

#include <launcher/error_file.h>
#include <launcher/outer_launcher.h>
#include <launcher/report.h>
#include <launcher/root_cause.h>

#include "catch2.h"

using namespace ddp::launcher;
using std::chrono::milliseconds;

namespace {

using Time = std::chrono::system_clock::time_point;

const Time kStart{std::chrono::seconds(1700000000)};

Time at(int ms) { return kStart + milliseconds(ms); }

/// A worker with a life from 0 to `end` (milliseconds).
Worker ended(int end, int wait_status = W_EXITCODE(1, 0)) {
  Worker worker;
  worker.started = kStart;
  worker.ended_with(wait_status);
  worker.ended = at(end);
  return worker;
}

Worker with_error(Worker worker, int earliest, int latest) {
  worker.error_time = {at(earliest), at(latest)};
  return worker;
}

Worker stopped(Worker worker) {
  worker.stopped = true;
  return worker;
}

using Order = std::vector<size_t>;

Order ordered(std::vector<Worker> workers, Order failures, int stopped_at = 10000) {
  order_failures(workers, failures, at(stopped_at));
  return failures;
}

}  // namespace

TEST_CASE("without times in files the first to end is the root cause") {
  CHECK(ordered({ended(300), ended(100), ended(200)}, {1, 2, 0}) == Order{1, 2, 0});
  CHECK(ordered({ended(300)}, {}).empty());
}

TEST_CASE("who failed earlier and ended later is the root cause") {
  CHECK(ordered({with_error(ended(900), 50, 50), ended(100), ended(200)}, {1, 2, 0}) ==
        Order{0, 1, 2});
  CHECK(ordered({with_error(ended(900), 150, 150), ended(100)}, {1, 0}) == Order{1, 0});
  CHECK(ordered({with_error(ended(200), 150, 150), with_error(ended(300), 140, 140)}, {0, 1}) ==
        Order{1, 0});
}

TEST_CASE("a time in whole seconds counts where it is sure") {
  // From 0 to 1 s: it may have been before the end at 500 ms, or after it.
  CHECK(ordered({with_error(ended(3000), 0, 1000), ended(500)}, {1, 0}) == Order{1, 0});
  CHECK(ordered({with_error(ended(3000), 0, 1000), ended(1500)}, {1, 0}) == Order{0, 1});
  // Not after its own end.
  CHECK(ordered({ended(700), with_error(ended(600), 0, 1000)}, {0, 1}) == Order{1, 0});
}

TEST_CASE("a time that is not of the worker's life is not believed") {
  CHECK(ordered({with_error(ended(900), -5000, -5000), ended(100)}, {1, 0}) == Order{1, 0});
  CHECK(ordered({ended(100), with_error(ended(90), 5000, 5000)}, {0, 1}) == Order{1, 0});
}

TEST_CASE("who had failed before the others were stopped was not merely stopped") {
  const Worker told = stopped(ended(2000, W_EXITCODE(0, SIGTERM)));
  std::vector<Worker> workers = {with_error(told, 500, 500), ended(900, W_EXITCODE(4, 0)), told};
  Order failures = {1};
  order_failures(workers, failures, at(1000));
  CHECK(failures == Order{0, 1});
  CHECK_FALSE(workers[0].stopped);
  CHECK(workers[2].stopped);
  // Its end is the launcher's doing, and so its status says nothing.
  CHECK(failure_status(workers, failures) == 4);
  const std::string report = failure_report(workers, failures, "h", "p");
  CHECK_THAT(report,
             ContainsSubstring("left an error, and was then stopped by the launcher (SIGTERM)"));
  CHECK_THAT(report, ContainsSubstring("exit status: 4"));
  // What it says after it was told is a consequence.
  CHECK(ordered({with_error(told, 1001, 1001), ended(900)}, {1}, 1000) == Order{1});
  // In a job that its user stopped nobody has failed.
  CHECK(ordered({with_error(told, 500, 500)}, {}, 1000).empty());
}

TEST_CASE("the status of one that ended of its own after its error is its own") {
  std::vector<Worker> workers = {with_error(stopped(ended(2000, W_EXITCODE(9, 0))), 500, 500),
                                 ended(900, W_EXITCODE(4, 0))};
  Order failures = {1};
  order_failures(workers, failures, at(1000));
  CHECK(failure_status(workers, failures) == 9);
}

TEST_CASE("the time in an error file") {
  const auto exact = error_time(
      R"({"message": {"message": "x", "extraInfo": {"timestamp": "1700000000", "timestamp_us": "1700000000250000"}}})");
  REQUIRE(exact);
  CHECK(exact->earliest == at(250));
  CHECK(exact->latest == at(250));
  const auto second =
      error_time(R"({"message": {"message": "x", "extraInfo": {"timestamp": "1700000000"}}})");
  REQUIRE(second);
  CHECK(second->earliest == at(0));
  CHECK(second->latest == at(1000));
  for (const char* none :
       {"", "text", R"({"message": "x"})", R"({"message": {"extraInfo": {"timestamp": "-1"}}})",
        R"({"message": {"extraInfo": {"timestamp": "99999999999999"}}})",
        R"({"message": {"extraInfo": {"timestamp": "1.5"}}})"}) {
    INFO(none);
    CHECK_FALSE(error_time(none));
  }
}

TEST_CASE("an outer launcher gets what the root cause left, as JSON in any case") {
  Worker worker = ended(500, W_EXITCODE(0, SIGSEGV));
  worker.rank = 3;
  const std::string recorded = R"({"message": {"message": "E: x"}})";
  CHECK(error_content(worker, recorded, "h") == recorded);
  const std::string nothing = error_content(worker, "", "h");
  CHECK_THAT(error_text(nothing), ContainsSubstring("rank 3 "));
  CHECK_THAT(error_text(nothing), ContainsSubstring("host h) was killed by SIGSEGV"));
  REQUIRE(error_time(nothing));
  CHECK(error_time(nothing)->earliest == at(500));
  worker.error_text = error_text("plain \"text\"\xff");
  CHECK_THAT(error_text(error_content(worker, "plain \"text\"\xff", "h")),
             ContainsSubstring("plain \"text\"\xef\xbf\xbd"));
}
