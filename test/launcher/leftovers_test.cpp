// Nothing outlives the launcher.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <launcher/descendants.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

const std::string kTwo = "--nproc_per_node=2";
const std::vector<std::string> kReady = {"daemon.0", "daemon.1"};

/// Each worker has a child, and a grandchild that is a daemon: in a session of its own, no child of
/// the worker any more, deaf to polite signals. Then the worker goes on with `then`.
std::string with_daemon(const std::string& then) {
  return "sleep 300 &\n"
         "(setsid /bin/sh -c 'trap \"\" TERM HUP INT; echo > $DIR/daemon.$RANK; sleep 300; :' &)\n"
         "echo $$ > $DIR/pid.$RANK\n"
         "until [ -e $DIR/daemon.$RANK ]; do sleep 0.01; done\n" +
         then;
}

}  // namespace

TEST_CASE("nothing is left after a normal end") {
  LaunchProcess job(with_script({kTwo}, with_daemon("exit 0")));
  CHECK(job.wait() == 0);
  CHECK(job.processes().empty());  // at once, not some time later
  CHECK_THAT(job.errors(), ContainsSubstring("left behind"));
}

TEST_CASE("nothing is left after a failure") {
  LaunchProcess job(with_script({kTwo}, with_daemon("[ $RANK = 0 ] && exit 5; sleep 300")));
  CHECK(job.wait() == 5);
  CHECK(job.processes().empty());
}

TEST_CASE("nothing is left after a signal to the launcher") {
  LaunchProcess job(with_script({kTwo}, with_daemon("sleep 300")));
  job.await_files(kReady);
  REQUIRE(::kill(job.pid(), SIGTERM) == 0);
  CHECK(job.wait() == 143);
  CHECK(job.processes().empty());
}

TEST_CASE("nothing is left when the launcher is killed") {
  LaunchProcess job(with_script({kTwo}, with_daemon("trap '' TERM; sleep 300")));
  job.await_files(kReady);
  CHECK(job.processes().size() >= 8);  // the count can see them
  REQUIRE(::kill(job.pid(), SIGKILL) == 0);
  CHECK(job.wait() == 137);
  CHECK(job.none_left());
}

TEST_CASE("nothing is left when the launcher's process group is killed") {
  LaunchProcess job(with_script({kTwo}, with_daemon("sleep 300")));
  job.await_files(kReady);
  REQUIRE(::kill(-job.pid(), SIGKILL) == 0);
  CHECK(job.wait() == 137);
  CHECK(job.none_left());
}

TEST_CASE("nothing is left when the guardian is killed") {
  LaunchProcess job(with_script({kTwo}, with_daemon("sleep 300")));
  job.await_files(kReady);
  REQUIRE(::kill(job.guardian(), SIGKILL) == 0);
  CHECK(job.wait() == 137);
  CHECK(job.processes().empty());
  CHECK_THAT(job.errors(), ContainsSubstring("guardian"));
}

TEST_CASE("no worker is left when both processes of the launcher are killed") {
  LaunchProcess job(with_script({kTwo}, "echo $$ > $DIR/pid.$RANK; exec sleep 300"));
  job.pid_from("pid.0");
  job.pid_from("pid.1");
  const pid_t guardian = job.guardian();
  REQUIRE(::kill(job.pid(), SIGSTOP) == 0);  // it cannot clean up between the two
  REQUIRE(::kill(guardian, SIGKILL) == 0);
  REQUIRE(::kill(job.pid(), SIGKILL) == 0);
  CHECK(job.wait() == 137);
  CHECK(job.none_left());
}

TEST_CASE("the guardian goes by another name than the launcher") {
  LaunchProcess job(with_script({}, "echo > $DIR/ready; exec sleep 300"));
  job.await_files({"ready"});
  const std::string folder = "/proc/" + std::to_string(job.guardian());
  for (const std::string file : {"comm", "cmdline"}) {
    std::string text;
    if (FILE* opened = std::fopen((folder + "/" + file).c_str(), "r")) {
      for (int byte = std::fgetc(opened); byte != EOF; byte = std::fgetc(opened))
        text.push_back(static_cast<char>(byte));
      std::fclose(opened);
    }
    CHECK_THAT(text, ContainsSubstring("ddp-guardian"));
    CHECK_THAT(text, !ContainsSubstring("launch"));
  }
}

TEST_CASE("processes that the launcher's shell had started before are not touched") {
  LaunchProcess::Setup setup;
  setup.run_through = {"/bin/sh", "-c", "sleep 300 & echo $! > $DIR/before; exec \"$@\"", "sh"};
  LaunchProcess job(with_script({kTwo}, with_daemon("sleep 300")), setup);
  job.await_files(kReady);
  const pid_t before = job.pid_from("before");
  REQUIRE(::kill(job.guardian(), SIGKILL) == 0);
  CHECK(job.wait() == 137);
  CHECK(job.processes() == std::vector<pid_t>{before});
}

TEST_CASE("many workers on few file descriptors") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] {
    const rlimit few{32, 32};
    ::setrlimit(RLIMIT_NOFILE, &few);
  };
  LaunchProcess well(with_script({"--nproc_per_node=64"}, "exit 0"), setup);
  CHECK(well.wait() == 0);
  CHECK(well.errors() == "");
  LaunchProcess badly(
      with_script({"--nproc_per_node=64"}, "[ $RANK = 63 ] && exit 9; exec sleep 300"), setup);
  CHECK(badly.wait() == 9);
  CHECK_THAT(badly.errors(), ContainsSubstring("rank 63 exited with code 9"));
  CHECK(badly.processes().empty());
}

TEST_CASE("a storm of kills leaves nothing") {
  const char* wanted = std::getenv("DDP_STORM_ROUNDS");
  const int rounds = wanted != nullptr ? std::atoi(wanted) : 100;
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    LaunchProcess job(with_script({kTwo, "--grace_period=0.05"}, with_daemon("sleep 300")));
    // In half of the rounds it hits a job that is just starting.
    if (random() % 2 == 0) {
      job.await_files(kReady);
    } else {
      ::usleep(static_cast<useconds_t>(random() % 5000));
    }
    const unsigned target = random() % 4;
    INFO("round " << round << ", target " << target);
    const auto below = ddp::launcher::descendants_of(job.pid());
    std::vector<pid_t> victims;
    switch (target) {
      case 0:  // the guardian, or any process below it
        if (!below.empty()) victims.push_back(below[random() % below.size()].pid);
        break;
      case 1:  // the launcher
        victims.push_back(job.pid());
        break;
      case 2:  // the launcher, and any process below the guardian
        for (const auto& process : below) {
          if (process.parent != job.pid()) victims.push_back(process.pid);
        }
        if (!victims.empty()) victims = {victims[random() % victims.size()]};
        victims.push_back(job.pid());
        break;
      default:  // the guardian
        if (!below.empty()) victims.push_back(below.front().pid);
    }
    for (const pid_t victim : victims) ::kill(victim, SIGKILL);
    if (target == 0 || target == 3) {
      // Where the victim was none that ends a job (a daemon, or nothing was there yet).
      ::kill(job.pid(), SIGTERM);
    }
    job.wait();
    REQUIRE(job.none_left());
  }
}
