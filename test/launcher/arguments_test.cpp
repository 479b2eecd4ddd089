// The command line as the launched program sees it. (Case C26.)

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("the program's arguments are its own, whatever they look like") {
  LaunchProcess job({"--nproc-per-node", "2", "--use-env", worker_program(), "--r=16", "--log", "x",
                     "--nproc-per-node", "9", "--", "-m", "--mo", "0.9", "", "a b"});
  CHECK(job.wait() == 0);
  const std::string expected =
      ": <--r=16> <--log> <x> <--nproc-per-node> <9> <--> <-m> <--mo> <0.9> <> <a b>";
  CHECK(sorted_lines(job.output()) == Lines{"0" + expected, "1" + expected});
}

TEST_CASE("an unknown option before the program is an error that names it") {
  LaunchProcess job({"--nproc_per_node=2", "--nprocs=2", worker_program()});
  CHECK(job.wait() == 2);
  CHECK_THAT(job.errors(), ContainsSubstring("--nprocs"));
  CHECK(job.output() == "");
}

TEST_CASE("without --use_env the program gets --local_rank first") {
  LaunchProcess job({"--nproc_per_node=2", worker_program(), "a", "--use_env"});
  CHECK(job.wait() == 0);
  CHECK(sorted_lines(job.output()) ==
        Lines{"0: <--local_rank=0> <a> <--use_env>", "1: <--local_rank=1> <a> <--use_env>"});
}

TEST_CASE("called as ddprun it leaves the rank to the environment") {
  LaunchProcess::Setup setup;
  setup.name = "ddprun";
  LaunchProcess job({"--nproc_per_node=2", "--", worker_program(), "--", "a"}, setup);
  CHECK(job.wait() == 0);
  CHECK(sorted_lines(job.output()) == Lines{"0: <--> <a>", "1: <--> <a>"});
}

TEST_CASE("local rank 0 has the launcher's input, the others none") {
  LaunchProcess::Setup setup;
  setup.input = "some input\n";
  // Rank 0 reads last: what the others get of its input it misses.
  LaunchProcess job(
      with_script({"--nproc_per_node=3"},
                  "if [ $RANK = 0 ]; then\n"
                  "  until [ -e $DIR/read.1 ] && [ -e $DIR/read.2 ]; do sleep 0.01; done\n"
                  "fi\n"
                  "echo \"$RANK: $(cat)\"\n"
                  "echo > $DIR/read.$RANK"),
      setup);
  CHECK(job.wait() == 0);
  CHECK(sorted_lines(job.output()) == Lines{"0: some input", "1: ", "2: "});
}

TEST_CASE("the workers' environment reaches them") {
  LaunchProcess job(
      with_script({"--nproc_per_node=2"},
                  "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR "
                  "$GLOO_SOCKET_IFNAME ${OMP_NUM_THREADS:+set}"));
  CHECK(job.wait() == 0);
  CHECK(sorted_lines(job.output()) ==
        Lines{"0 0 2 2 0 127.0.0.1 lo set", "1 1 2 2 0 127.0.0.1 lo set"});
}

TEST_CASE("help and version go to standard output") {
  LaunchProcess help({"--help"});
  CHECK(help.wait() == 0);
  CHECK_THAT(help.output(), ContainsSubstring("--nproc_per_node"));
  LaunchProcess version({"--version"});
  CHECK(version.wait() == 0);
  CHECK_THAT(version.output(), ContainsSubstring("launch "));
}

TEST_CASE("a command line without a program says how it is meant") {
  LaunchProcess job({"--nproc_per_node=2"});
  CHECK(job.wait() == 2);
  CHECK_THAT(job.errors(), ContainsSubstring("Usage"));
}
