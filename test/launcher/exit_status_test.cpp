// The launcher's exit status and its report, when workers end well, badly, and not at all. (Cases
// C21, C22.)

#include <signal.h>
#include <sys/stat.h>

#include <string>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

const std::string kTwo = "--nproc_per_node=2";

/// The part of the report between two headings.
std::string section(const std::string& text, const std::string& from, const std::string& to) {
  const auto begin = text.find(from);
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find(to, begin) - begin);
}

/// Rank 1 runs `ending` once rank 0 is there, which would sleep for ever.
std::string rank_1_ends_by(const std::string& ending) {
  return "echo $$ > $DIR/pid.$RANK\n"
         "if [ $RANK = 0 ]; then sleep 300; exit 0; fi\n"
         "until [ -e $DIR/pid.0 ]; do sleep 0.01; done\n" +
         ending;
}

void check_report(const LaunchProcess& job, const std::string& how) {
  const std::string report = job.errors();
  const std::string cause = section(report, "root cause:", "stopped by the launcher");
  const std::string stopped = section(report, "stopped by the launcher", "exit status");
  const std::string pid_0 = "pid " + std::to_string(job.pid_from("pid.0")) + ")";
  const std::string pid_1 = "pid " + std::to_string(job.pid_from("pid.1"));
  INFO(report);
  CHECK_THAT(cause, ContainsSubstring("rank 1"));
  CHECK_THAT(cause, ContainsSubstring(pid_1 + ", host "));
  CHECK_THAT(cause, ContainsSubstring(how));
  CHECK_THAT(cause, !ContainsSubstring("rank 0"));
  CHECK_THAT(stopped, ContainsSubstring("rank 0"));
  CHECK_THAT(stopped, ContainsSubstring(pid_0));
  CHECK_THAT(stopped, !ContainsSubstring("rank 1"));
}

void check_failure(const std::string& ending, int status, const std::string& how) {
  LaunchProcess job(with_script({kTwo}, rank_1_ends_by(ending)));
  CHECK(job.wait() == status);
  CHECK(job.seconds() < 25);  // not the grace of 30 s
  check_report(job, how);
  CHECK(job.none_left());
}

}  // namespace

TEST_CASE("a worker fails while the others hang: all are stopped, its code is the status") {
  check_failure("exit 3", 3, "exited with code 3");
}

TEST_CASE("exit status: a code") { check_failure("exit 7", 7, "exited with code 7"); }

TEST_CASE("exit status: SIGKILL") { check_failure("kill -KILL $$", 137, "killed by SIGKILL"); }

TEST_CASE("exit status: SIGSEGV") { check_failure("kill -SEGV $$", 139, "killed by SIGSEGV"); }

TEST_CASE("exit status: an exception that nobody catches") {
  check_failure("exec " + worker_program() + " throw", 134, "killed by SIGABRT");
}

TEST_CASE("exit status: all succeed") {
  LaunchProcess job(with_script({kTwo}, "exit 0"));
  CHECK(job.wait() == 0);
  CHECK(job.errors() == "");
  CHECK(job.none_left());
}

TEST_CASE("exit status: there is no such program") {
  for (const std::string program :
       {"/nonexistent/folder/train", "./no-such-train", "no-such-train"}) {
    LaunchProcess job({kTwo, program});
    CHECK(job.wait() == 127);
    CHECK_THAT(job.errors(), ContainsSubstring(program));
    CHECK(job.none_left());
  }
}

TEST_CASE("exit status: the program cannot be executed") {
  LaunchProcess other(
      with_script({},
                  "echo not for this machine > $DIR/text; chmod +x $DIR/text\n"
                  "echo '#!/nonexistent/sh' > $DIR/script; chmod +x $DIR/script\n"
                  "echo '#!/bin/sh' > $DIR/plain; chmod -x $DIR/plain; mkdir $DIR/folder"));
  REQUIRE(other.wait() == 0);
  const std::pair<std::string, int> programs[] = {
      {"plain", 126}, {"folder", 126}, {"text", 126}, {"script", 127}};
  for (const auto& [name, status] : programs) {
    const std::string path = other.folder() + "/" + name;
    LaunchProcess job({kTwo, path});
    CHECK(job.wait() == status);
    CHECK_THAT(job.errors(), ContainsSubstring(path));
    CHECK(job.none_left());
  }
}

TEST_CASE("a worker that ends well early does not disturb the others") {
  LaunchProcess job(
      with_script({kTwo},
                  "echo $$ > $DIR/pid.$RANK\n"
                  "if [ $RANK = 1 ]; then exit 0; fi\n"
                  "trap 'echo told > $DIR/told' TERM\n"
                  "until [ -e $DIR/pid.1 ] && ! kill -0 $(cat $DIR/pid.1) 2> $DIR/null; do\n"
                  "  sleep 0.01\n"
                  "done\n"
                  "sleep 1\n"
                  "echo done > $DIR/finished"));
  CHECK(job.wait() == 0);
  CHECK(job.has("finished"));
  CHECK_FALSE(job.has("told"));
  CHECK(job.seconds() >= 1);
  CHECK(job.errors() == "");
}

TEST_CASE("a worker that fails because it was stopped is not the root cause") {
  LaunchProcess job(with_script({kTwo},
                                "trap 'exit 9' TERM\n"
                                "echo $$ > $DIR/pid.$RANK\n"
                                "until [ -e $DIR/pid.0 ]; do sleep 0.01; done\n"
                                "[ $RANK = 1 ] && exit 7\n"
                                "while :; do sleep 0.01; done"));
  CHECK(job.wait() == 7);
  check_report(job, "exited with code 7");
  CHECK_THAT(job.errors(), ContainsSubstring("exited with code 9"));
}

TEST_CASE("of two failures the earlier one is the root cause, also when both are seen at once") {
  // The launcher is stopped while first rank 1 and then rank 0 fails.
  LaunchProcess job(with_script({kTwo},
                                "echo $$ > $DIR/pid.$RANK\n"
                                "until [ -e $DIR/end.$RANK ]; do sleep 0.01; done\n"
                                "exit 1$RANK"));
  const pid_t ranks[] = {job.pid_from("pid.0"), job.pid_from("pid.1")};
  const pid_t guardian = job.guardian();
  await("the guardian watches both", [&] { return process_state(guardian) == 'S'; });
  REQUIRE(::kill(guardian, SIGSTOP) == 0);
  await("the guardian is stopped", [&] { return process_state(guardian) == 'T'; });
  for (const int rank : {1, 0}) {
    job.write("end." + std::to_string(rank));
    await("the worker is dead", [&] { return process_state(ranks[rank]) == 'Z'; });
  }
  REQUIRE(::kill(guardian, SIGCONT) == 0);
  CHECK(job.wait() == 11);
  const std::string report = job.errors();
  INFO(report);
  CHECK_THAT(section(report, "root cause:", "failed as well"), ContainsSubstring("rank 1"));
  CHECK_THAT(section(report, "failed as well", "exit status"), ContainsSubstring("rank 0"));
  CHECK_THAT(report, !ContainsSubstring("stopped by the launcher"));
}
