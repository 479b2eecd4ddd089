// Attempts after a failure, the job's time limit, and what a worker says about its error.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <launcher/unique_fd.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

const std::string kTwo = "--nproc_per_node=2";

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

TEST_CASE("all workers are started again after a failure, as often as it is allowed") {
  LaunchProcess job(with_script({kTwo, "--max-restarts=3"},
                                "n=$TORCHELASTIC_RESTART_COUNT\n"
                                "echo $MASTER_PORT > $DIR/port.$n.$RANK\n"
                                "[ $TORCHELASTIC_MAX_RESTARTS = 3 ] || exit 9\n"
                                "[ $n = 2 ] && exec " +
                                    worker_program() +
                                    " meet adopt\n"
                                    "if [ $RANK = 1 ]; then\n"
                                    "  until [ -e $DIR/port.$n.0 ]; do sleep 0.01; done; exit 4\n"
                                    "fi\n"
                                    "exec sleep 300"));
  const int status = job.wait();
  INFO(job.errors());
  CHECK(status == 0);
  CHECK(count(job.errors(), "rank 1 exited with code 4 (restart") == 2);
  CHECK_THAT(job.errors(), ContainsSubstring("(restart 1 of 3)"));
  CHECK_THAT(job.errors(), ContainsSubstring("(restart 2 of 3)"));
  CHECK(job.read("port.0.0") == job.read("port.0.1"));
  CHECK(job.read("port.1.0") == job.read("port.1.1"));
  CHECK(job.read("port.0.0") != job.read("port.1.0"));
  CHECK_FALSE(job.has("port.3.0"));
  CHECK(job.none_left());
}

TEST_CASE("when the restarts are used up the last failure is the job's") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  LaunchProcess job(with_script(
      {kTwo, "--max-restarts=2", "--redirects=1", "--rdzv-id=run", "--log-dir", logs.folder()},
      "[ $RANK = 0 ] && exec sleep 300\n"
      "echo $TORCHELASTIC_RESTART_COUNT; exit 1$TORCHELASTIC_RESTART_COUNT"));
  CHECK(job.wait() == 12);
  CHECK(count(job.errors(), "root cause:") == 3);
  CHECK_THAT(job.errors(), ContainsSubstring("exit status: 12"));
  for (const std::string n : {"0", "1", "2"}) {
    CHECK(logs.read("run/attempt_" + n + "/1/stdout.log") == n + "\n");
    CHECK_THAT(job.errors(), ContainsSubstring("attempt_" + n + "/"));
  }
  CHECK_FALSE(logs.has("run/attempt_3"));
}

TEST_CASE("a signal ends the job in whatever attempt, and there is no other") {
  LaunchProcess job(with_script({kTwo, "--max-restarts=5"},
                                "echo > $DIR/ready.$TORCHELASTIC_RESTART_COUNT.$RANK\n"
                                "[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 4\n"
                                "exec sleep 300"));
  job.await_files({"ready.1.0", "ready.1.1"});
  REQUIRE(::kill(job.pid(), SIGTERM) == 0);
  CHECK(job.wait() == 143);
  CHECK_FALSE(job.has("ready.2.0"));
}

TEST_CASE("a signal while the workers of a failed attempt are stopped: no other attempt") {
  LaunchProcess job(with_script({kTwo, "--max-restarts=5"},
                                "n=$TORCHELASTIC_RESTART_COUNT\n"
                                "trap 'echo > $DIR/told.$n' TERM\n"
                                "echo > $DIR/ready.$n.$RANK\n"
                                "if [ $RANK = 1 ]; then\n"
                                "  until [ -e $DIR/ready.$n.0 ]; do sleep 0.01; done; exit 4\n"
                                "fi\n"
                                "until [ -e $DIR/end ]; do sleep 0.01; done"));
  job.await_files({"told.0"});
  REQUIRE(::kill(job.pid(), SIGHUP) == 0);
  CHECK(job.wait() == 4);
  CHECK_FALSE(job.has("ready.1.0"));
}

TEST_CASE("a program that cannot be executed is not tried again") {
  LaunchProcess job(with_script({}, "echo no program > $DIR/text; chmod +x $DIR/text"));
  REQUIRE(job.wait() == 0);
  LaunchProcess again({"--max-restarts=3", job.folder() + "/text"});
  CHECK(again.wait() == 126);
  CHECK_THAT(again.errors(), !ContainsSubstring("starting"));
}

TEST_CASE("several nodes: each launcher starts its own workers again, at the same port") {
  const ddp::launcher::UniqueFd held(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(held.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  REQUIRE(::bind(held.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(::getsockname(held.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  std::vector<std::unique_ptr<LaunchProcess>> nodes;
  for (const std::string node : {"0", "1"}) {
    nodes.push_back(std::make_unique<LaunchProcess>(
        with_script({kTwo, "--nnodes=2", "--node_rank=" + node, "--rdzv-backend=static",
                     "--rdzv-endpoint=127.0.0.1:" + std::to_string(ntohs(address.sin_port)),
                     "--max-restarts=1"},
                    "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 5; exec " + worker_program() +
                        " meet plain")));
  }
  for (const auto& node : nodes) {
    const int status = node->wait();
    INFO(node->errors());
    CHECK(status == 0);
  }
}

TEST_CASE("a job that takes too long is stopped, with a status of its own") {
  LaunchProcess job(with_script({kTwo, "--timeout=0.5", "--max-restarts=3"},
                                "trap 'echo > $DIR/told.$RANK; exit 0' TERM\n"
                                "while :; do sleep 0.01; done"));
  CHECK(job.wait() == 124);
  CHECK(job.has("told.0"));
  CHECK(job.has("told.1"));
  CHECK_THAT(job.errors(), ContainsSubstring("--timeout"));
  CHECK_THAT(job.errors(), !ContainsSubstring("root cause"));
  CHECK(job.none_left());
  LaunchProcess quick(with_script({kTwo, "--timeout=600"}, "exit 0"));
  CHECK(quick.wait() == 0);
  LaunchProcess failing(with_script({kTwo, "--timeout=600"}, "exit 6"));
  CHECK(failing.wait() == 6);
}

TEST_CASE("the report has what the first to fail left in its error file") {
  LaunchProcess job(
      with_script({kTwo},
                  "echo $TORCHELASTIC_ERROR_FILE > $DIR/path.$RANK\n"
                  "if [ $RANK = 1 ]; then\n"
                  "  until [ -s $DIR/path.0 ]; do sleep 0.01; done\n"
                  "  printf '{\"message\": {\"message\": \"ValueError: 7 apples\", \"extraInfo\": "
                  "{\"py_callstack\": \"\"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1\n"
                  "fi\n"
                  "echo rank 0 says nothing > $TORCHELASTIC_ERROR_FILE; exec sleep 300"));
  CHECK(job.wait() == 1);
  CHECK_THAT(job.errors(), ContainsSubstring("ValueError: 7 apples"));
  CHECK_THAT(job.errors(), !ContainsSubstring("says nothing"));
  CHECK(job.read("path.0") != job.read("path.1"));
  for (const std::string file : {"path.0", "path.1"}) {
    const std::string path = job.read(file);
    CHECK_FALSE(std::filesystem::exists(path.substr(0, path.size() - 1)));
  }
}

TEST_CASE("with a log folder the error file stays") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  logs.write("marker");
  LaunchProcess job(with_script({kTwo, "--rdzv-id=run", "--log-dir", logs.folder()},
                                "[ $RANK = 0 ] && exec sleep 300\n"
                                "cd /; echo text of $RANK > $TORCHELASTIC_ERROR_FILE; exit 3"));
  CHECK(job.wait() == 3);
  CHECK_THAT(job.errors(), ContainsSubstring("text of "));
  CHECK(logs.read("run/attempt_0/1/error.json") == "text of 1\n");
}

TEST_CASE("an error file of an earlier run is not taken for this one's, nor a pipe read") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  const std::vector<std::string> options = {"--rdzv-id=run", "--log-dir", logs.folder()};
  LaunchProcess first(with_script(options, "echo old > $TORCHELASTIC_ERROR_FILE; exit 3"));
  CHECK(first.wait() == 3);
  LaunchProcess second(with_script(options, "exit 3"));
  CHECK(second.wait() == 3);
  CHECK_THAT(second.errors(), !ContainsSubstring("old"));
  LaunchProcess odd(with_script(options, "mkfifo $TORCHELASTIC_ERROR_FILE; exit 3"));
  CHECK(odd.wait() == 3);
}

TEST_CASE("the root cause is who failed first, even if it ends last") {
  // Rank 1 says what has happened and then takes its time; rank 0 ends because of it.
  LaunchProcess job(with_script(
      {kTwo},
      "if [ $RANK = 1 ]; then\n"
      "  printf '{\"message\": {\"message\": \"the cause\", \"extraInfo\": {\"timestamp_us\": "
      "\"%s\"}}}' $(($(date +%s%N) / 1000)) > $TORCHELASTIC_ERROR_FILE\n"
      "  echo > $DIR/failed; exec sleep 300\n"
      "fi\n"
      "until [ -e $DIR/failed ]; do sleep 0.01; done; exit 8"));
  CHECK(job.wait() == 8);
  CHECK_THAT(job.errors(), ContainsSubstring("failed: rank 1 left an error"));
  CHECK_THAT(job.errors(), ContainsSubstring("the cause"));
  const std::string errors = job.errors();
  CHECK(errors.find("failed as well") <
        errors.find("rank 0 (local rank 0, pid", errors.find("root cause")));
}

TEST_CASE("a launcher under a launcher passes the root cause's error on") {
  const std::string inner =
      std::string(DDP_LAUNCH_FOLDER) + "/launch --use_env --nproc_per_node=2 ";
  LaunchProcess said(with_script(
      {"--use_env"}, inner +
                         "sh -c '[ $RANK = 1 ] && { echo these words > $TORCHELASTIC_ERROR_FILE; "
                         "exit 3; }; exec sleep 300'"));
  CHECK(said.wait() == 3);
  const std::string errors = said.errors();
  const auto outer = errors.rfind("root cause");
  REQUIRE(outer != errors.find("root cause"));
  CHECK(errors.find("these words", outer) != std::string::npos);
  LaunchProcess silent(with_script({"--use_env"}, inner + "sh -c 'kill -SEGV $$'"));
  CHECK(silent.wait() == 139);
  CHECK(silent.errors().find("was killed by SIGSEGV", silent.errors().rfind("it said")) !=
        std::string::npos);
  LaunchProcess wrong(with_script({"--use_env"}, inner + "--nnodes=2 true"));
  CHECK(wrong.wait() == 2);
  CHECK(wrong.errors().find("needs --master_addr", wrong.errors().rfind("it said")) !=
        std::string::npos);
  // A job that succeeds, or is only tried again, leaves nothing there.
  LaunchProcess fine(with_script(
      {"--use_env"}, inner + "--max_restarts=1 sh -c '[ $TORCHELASTIC_RESTART_COUNT = 1 ]'; "
                             "[ -s $TORCHELASTIC_ERROR_FILE ]"));
  CHECK(fine.wait() == 1);
  CHECK_THAT(fine.errors().substr(fine.errors().rfind("root cause")),
             !ContainsSubstring("it said"));
}

TEST_CASE("the report names this node as it is told, and the files") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  LaunchProcess job(with_script(
      {"--local-addr=node-seven", "--tee=3", "--rdzv-id=run", "--log-dir", logs.folder()},
      "exit 3"));
  CHECK(job.wait() == 3);
  CHECK_THAT(job.errors(), ContainsSubstring("host node-seven"));
  CHECK_THAT(job.errors(),
             ContainsSubstring("see " + logs.folder() + "/run/attempt_0/0/stderr.log"));
}
