// Counting GPUs, giving each worker one, and binding workers to cores.

#include <sched.h>

#include <fstream>
#include <string>

#include <launcher/cores.h>
#include <launcher/numa.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;
using ddp::launcher::available_cores;

namespace {

LaunchProcess::Setup with_gpus(const std::string& gpus) {
  LaunchProcess::Setup setup;
  setup.environment = {{"LD_LIBRARY_PATH", DDP_FAKE_CUDA_FOLDER}, {"FAKE_GPUS", gpus}};
  setup.before_exec = [] { ::unsetenv("CUDA_VISIBLE_DEVICES"); };
  return setup;
}

/// The number of workers that `wanted` gives.
std::string workers(const std::string& wanted, const std::string& gpus) {
  LaunchProcess job(
      with_script({"--nproc_per_node=" + wanted}, "[ $RANK = 0 ] && echo $WORLD_SIZE; exit 0"),
      with_gpus(gpus));
  CHECK(job.wait() == 0);
  return job.output();
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

TEST_CASE("gpu is a worker for each GPU of the driver, auto as well where there is one") {
  CHECK(workers("gpu", "0000:01:00.0 0000:02:00.0 0000:03:00.0") == "3\n");
  CHECK(workers("auto", "0000:01:00.0 0000:02:00.0 0000:03:00.0") == "3\n");
  CHECK(workers("auto", "") == std::to_string(available_cores()) + "\n");
  CHECK(workers("auto", "!999") == std::to_string(available_cores()) + "\n");
}

TEST_CASE("gpu without a GPU says what is missing") {
  const std::pair<std::string, std::string> cases[] = {
      {"", "no GPU is visible"}, {"!100", "no GPU is visible"}, {"!999", "error 999"}};
  for (const auto& [gpus, said] : cases) {
    LaunchProcess job(with_script({"--nproc_per_node=gpu"}, "echo > $DIR/started"),
                      with_gpus(gpus));
    CHECK(job.wait() == 1);
    CHECK_THAT(job.errors(), ContainsSubstring(said));
    CHECK_FALSE(job.has("started"));
  }
}

TEST_CASE("a virtual local rank has one device, of those that the launcher has") {
  LaunchProcess::Setup setup;
  const std::vector<std::string> job_of_two =
      with_script({"--nproc_per_node=2", "--virtual-local-rank"},
                  "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES > $DIR/saw.$RANK");
  setup.environment = {{"CUDA_VISIBLE_DEVICES", "4,GPU-x,6"}};
  LaunchProcess given(job_of_two, setup);
  CHECK(given.wait() == 0);
  CHECK(given.read("saw.0") == "0 0 4\n");
  CHECK(given.read("saw.1") == "1 0 GPU-x\n");
  setup.environment = {{"CUDA_VISIBLE_DEVICES", "4"}};
  LaunchProcess few(job_of_two, setup);
  CHECK(few.wait() == 2);
  CHECK_THAT(few.errors(), ContainsSubstring("CUDA_VISIBLE_DEVICES=4 has 1"));
}

TEST_CASE("workers are bound to the cores of a NUMA node") {
  const auto nodes = ddp::launcher::parse_cpu_list(first_line("/sys/devices/system/node/has_cpu"));
  if (nodes.empty()) skip_test("this machine does not tell its NUMA nodes");
  LaunchProcess job(
      with_script({"--nproc_per_node=2", "--numa_binding=node"},
                  "grep Cpus_allowed_list /proc/self/status | cut -f 2 > $DIR/cores.$RANK"),
      with_gpus(""));
  const int status = job.wait();
  INFO(job.errors());
  REQUIRE(status == 0);
  const auto allowed = ddp::launcher::allowed_cores();
  const std::string last = std::to_string(nodes[nodes.size() / 2]);
  const std::string of[] = {std::to_string(nodes[0]), last};
  for (const int rank : {0, 1}) {
    const auto bound = ddp::launcher::parse_cpu_list(
        job.read("cores." + std::to_string(rank)).substr(0, job.read("cores.0").find('\n')));
    auto expected = ddp::launcher::parse_cpu_list(
        first_line("/sys/devices/system/node/node" + of[rank] + "/cpulist"));
    std::erase_if(expected, [&](int core) {
      return std::find(allowed.begin(), allowed.end(), core) == allowed.end();
    });
    CHECK(bound == expected);
  }
  LaunchProcess tried(
      with_script({"--nproc_per_node=2", "--numa_binding=node", "--dry_run"}, "exit 0"),
      with_gpus(""));
  CHECK(tried.wait() == 0);
  CHECK_THAT(tried.output(), ContainsSubstring("# rank 1, on cores "));
  LaunchProcess few(with_script({"--nproc_per_node=2", "--numa_binding=node"}, "exit 0"),
                    with_gpus("0000:01:00.0"));
  CHECK(few.wait() == 1);
  CHECK_THAT(few.errors(), ContainsSubstring("2 workers, but 1 visible GPU"));
}
