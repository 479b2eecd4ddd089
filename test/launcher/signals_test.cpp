// What the launcher does with the signals that it gets. (Case C23.)

#include <signal.h>

#include <string>
#include <vector>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

const std::string kTwo = "--nproc_per_node=2";
const std::vector<std::string> kReady = {"ready.0", "ready.1"};

/// Workers that save something when told to end, and take `seconds` for it.
std::string saves_on_term(const std::string& seconds) {
  return "trap 'sleep " + seconds +
         "; echo saved > $DIR/saved.$RANK; exit 0' TERM\n"
         "echo > $DIR/ready.$RANK\n"
         "while :; do sleep 0.05; done";
}

void send(const LaunchProcess& job, int signal) { REQUIRE(::kill(job.pid(), signal) == 0); }

}  // namespace

TEST_CASE("SIGTERM: the workers are told and may save their work") {
  LaunchProcess job(with_script({kTwo}, saves_on_term("2")));
  job.await_files(kReady);
  send(job, SIGTERM);
  CHECK(job.wait() == 143);
  CHECK(job.has("saved.0"));
  CHECK(job.has("saved.1"));
  CHECK(job.seconds() >= 2);
  CHECK(job.seconds() < 25);
  CHECK_THAT(job.errors(), ContainsSubstring("received SIGTERM"));
  CHECK_THAT(job.errors(), !ContainsSubstring("root cause"));
  CHECK(job.none_left());
}

TEST_CASE("SIGTERM: what does not end within the grace period is killed") {
  LaunchProcess job(with_script({kTwo, "--grace_period=1"},
                                "trap '' TERM\n"
                                "echo > $DIR/ready.$RANK\n"
                                "while :; do sleep 0.05; done"));
  job.await_files(kReady);
  send(job, SIGTERM);
  CHECK(job.wait() == 143);
  CHECK(job.seconds() >= 1);
  CHECK_THAT(job.errors(), ContainsSubstring("did not end within 1 s"));
  CHECK_THAT(job.errors(), ContainsSubstring("killed by SIGKILL"));
  CHECK(job.none_left());
}

TEST_CASE("SIGTERM: the grace period is the user's choice") {
  LaunchProcess slow(with_script({kTwo, "--grace-period", "0.5"}, saves_on_term("100")));
  LaunchProcess patient(with_script({kTwo, "--grace-period", "45"}, saves_on_term("2")));
  slow.await_files(kReady);
  patient.await_files(kReady);
  send(slow, SIGTERM);
  send(patient, SIGTERM);
  CHECK(slow.wait() == 143);
  CHECK_FALSE(slow.has("saved.0"));
  CHECK(slow.none_left());
  CHECK(patient.wait() == 143);
  CHECK(patient.has("saved.0"));
  CHECK(patient.has("saved.1"));
}

TEST_CASE("SIGTERM: a worker's children may save their work, too") {
  // The shell ends at once, the child that it has started in its group does not.
  LaunchProcess job(with_script({}, "(" + saves_on_term("1") + ") & wait"));
  job.await_files({"ready.0"});
  send(job, SIGTERM);
  CHECK(job.wait() == 143);
  CHECK(job.has("saved.0"));
  CHECK(job.none_left());
}

TEST_CASE("SIGTERM: a stopped worker is told as well") {
  LaunchProcess job(with_script({}, "echo $$ > $DIR/pid\n" + saves_on_term("0")));
  job.await_files({"ready.0"});
  const pid_t worker = job.pid_from("pid");
  REQUIRE(::kill(worker, SIGSTOP) == 0);
  await("the worker is stopped", [&] { return process_state(worker) == 'T'; });
  send(job, SIGTERM);
  CHECK(job.wait() == 143);
  CHECK(job.has("saved.0"));
  CHECK(job.seconds() < 25);
}

TEST_CASE("each of the ending signals is passed on as itself") {
  const std::pair<int, std::string> signals[] = {
      {SIGINT, "INT"}, {SIGHUP, "HUP"}, {SIGQUIT, "QUIT"}};
  for (const auto& [signal, name] : signals) {
    LaunchProcess job(
        with_script({kTwo}, "trap 'echo > $DIR/got." + name + ".$RANK; exit 5' " + name +
                                "\necho > $DIR/ready.$RANK\nwhile :; do sleep 0.05; done"));
    job.await_files(kReady);
    send(job, signal);
    CHECK(job.wait() == 128 + signal);
    CHECK(job.has("got." + name + ".0"));
    CHECK(job.has("got." + name + ".1"));
    CHECK(job.none_left());
  }
}

TEST_CASE("an interrupt while workers are being started ends the start") {
  constexpr int kWorkers = 1000;
  LaunchProcess::Setup setup;
  // It waits for the launcher, which therefore has it before the first worker.
  setup.before_exec = [] {
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    ::sigprocmask(SIG_BLOCK, &interrupt, nullptr);
    ::raise(SIGINT);
  };
  LaunchProcess job({"--nproc_per_node=" + std::to_string(kWorkers), "--grace_period=0",
                     "--use_env", "sleep", "300"},
                    setup);
  CHECK(job.wait() == 130);
  const std::string errors = job.errors();
  INFO(errors);
  const std::string before = "passing it to ";
  const auto at = errors.find(before);
  REQUIRE(at != std::string::npos);
  const int started = std::atoi(errors.c_str() + at + before.size());
  CHECK(started > 0);
  CHECK(started < kWorkers);
  // All that were: sixteen in the report, and so many more.
  const auto more = errors.find("  and ", at);
  if (more != std::string::npos) CHECK(std::atoi(errors.c_str() + more + 6) < kWorkers - 16);
  CHECK(job.none_left());
}

TEST_CASE("a second interrupt kills at once") {
  LaunchProcess job(with_script({kTwo, "--grace_period=300"},
                                "trap '' INT TERM\n"
                                "echo > $DIR/ready.$RANK\n"
                                "while :; do sleep 0.05; done"));
  job.await_files(kReady);
  send(job, SIGINT);
  await("the first one is taken",
        [&] { return job.errors().find("received SIGINT") != std::string::npos; });
  send(job, SIGINT);
  CHECK(job.wait() == 130);
  CHECK(job.none_left());
}

TEST_CASE("a signal that was ignored from the start stays ignored, as nohup wants it") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] { ::signal(SIGHUP, SIG_IGN); };
  LaunchProcess job(with_script({kTwo},
                                "echo > $DIR/ready.$RANK\n"
                                "until [ -e $DIR/end ]; do sleep 0.01; done"),
                    setup);
  job.await_files(kReady);
  send(job, SIGHUP);
  // Whoever had taken it would have printed so before it saw the workers' end.
  job.write("end");
  CHECK(job.wait() == 0);
  CHECK(job.errors() == "");
}

TEST_CASE("a stopped launcher does not stop the job") {
  LaunchProcess job(with_script({kTwo},
                                "echo > $DIR/ready.$RANK\n"
                                "until [ -e $DIR/go ]; do sleep 0.01; done\n"
                                "echo > $DIR/went.$RANK"));
  job.await_files(kReady);
  send(job, SIGSTOP);
  await("the launcher is stopped", [&] { return process_state(job.pid()) == 'T'; });
  job.write("go");
  job.await_files({"went.0", "went.1"});
  send(job, SIGCONT);
  CHECK(job.wait() == 0);
}

TEST_CASE("a terminal's stop key stops the workers with the launcher, and fg continues both") {
  // Workers that just wait: a shell that is starting something cannot be seen to stop.
  LaunchProcess job(with_script({kTwo},
                                "mkfifo $DIR/end.$RANK\n"
                                "echo $$ > $DIR/pid.$RANK\n"
                                "exec cat $DIR/end.$RANK"));
  const pid_t ranks[] = {job.pid_from("pid.0"), job.pid_from("pid.1")};
  send(job, SIGTSTP);
  await("all are stopped", [&] {
    return process_state(job.pid()) == 'T' && process_state(ranks[0]) == 'T' &&
           process_state(ranks[1]) == 'T';
  });
  send(job, SIGCONT);
  job.write("end.0");
  job.write("end.1");
  CHECK(job.wait() == 0);
}

TEST_CASE("SIGUSR1 and SIGUSR2 reach the workers alone, and the job goes on") {
  LaunchProcess job(with_script({kTwo},
                                "trap 'echo > $DIR/one.$RANK' USR1\n"
                                "trap 'echo > $DIR/two.$RANK' USR2\n"
                                "sleep 300 &\n"
                                "echo $! > $DIR/helper.$RANK\n"
                                "echo > $DIR/ready.$RANK\n"
                                "until [ -e $DIR/one.$RANK ] && [ -e $DIR/two.$RANK ]; do\n"
                                "  sleep 0.01\n"
                                "done\n"
                                "kill $(cat $DIR/helper.$RANK) && echo > $DIR/helped.$RANK"));
  job.await_files(kReady);
  send(job, SIGUSR1);
  send(job, SIGUSR2);
  CHECK(job.wait() == 0);
  CHECK(job.has("helped.0"));
  CHECK(job.has("helped.1"));
}

TEST_CASE("the user chooses which signals end the job in order") {
  LaunchProcess job(with_script({kTwo, "--signals-to-handle=SIGUSR1,INT"},
                                "trap 'echo > $DIR/told.$RANK; exit 0' USR1\n"
                                "echo > $DIR/ready.$RANK\n"
                                "while :; do sleep 0.01; done"));
  job.await_files(kReady);
  send(job, SIGUSR1);
  CHECK(job.wait() == 128 + SIGUSR1);
  CHECK(job.has("told.0"));
  CHECK(job.has("told.1"));
  CHECK_THAT(job.errors(), ContainsSubstring("received SIGUSR1"));
}

TEST_CASE("a signal that is left out ends the launcher as any program, and all with it") {
  LaunchProcess job(with_script({kTwo, "--signals-to-handle=SIGINT"},
                                "trap 'echo > $DIR/told.$RANK; exit 0' TERM\n"
                                "echo > $DIR/ready.$RANK\n"
                                "while :; do sleep 0.01; done"));
  job.await_files(kReady);
  send(job, SIGTERM);
  CHECK(job.wait() == 143);
  CHECK(job.none_left());
  CHECK_FALSE(job.has("told.0"));
}
