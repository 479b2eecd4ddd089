// The environment that a worker gets.

#include <algorithm>
#include <map>
#include <string>

#include <launcher/cores.h>
#include <launcher/environment.h>

#include "catch2.h"

using namespace ddp::launcher;

namespace {

using Variables = std::map<std::string, std::string>;

/// As a map; a variable that is there twice fails the test.
Variables read(char* const* environment) {
  Variables variables;
  for (; *environment != nullptr; ++environment) {
    const std::string entry = *environment;
    const auto equals = entry.find('=');
    CHECK(variables.emplace(entry.substr(0, equals), entry.substr(equals + 1)).second);
  }
  return variables;
}

Master local_master() {
  Master master;
  master.address = "127.0.0.1";
  master.port = 4321;
  master.loopback = true;
  return master;
}

Job job_with(const Options& options) {
  Job job;
  job.options = options;
  job.placement = options.placement();
  job.run_id = "some-run";
  return job;
}

constexpr const char* kNothing[] = {nullptr};

}  // namespace

TEST_CASE("a worker is told its place") {
  Options options;
  options.nnodes = 3;
  options.node_rank = 1;
  options.nproc_per_node = 2;
  Master master = local_master();
  master.loopback = false;
  options.role = "trainer";
  options.max_restarts = 3;
  const Job job = job_with(options);
  WorkerEnvironment environment(kNothing, job, master, 2);
  const Variables expected = {
      {"RANK", "3"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "6"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "3"},
      {"ROLE_RANK", "3"},
      {"ROLE_WORLD_SIZE", "6"},
      {"ROLE_NAME", "trainer"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "4321"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "3"},
      {"TORCHELASTIC_RUN_ID", "some-run"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / 2))},
  };
  CHECK(read(environment.of(1)) == expected);
}

TEST_CASE("what the launcher has is passed on, and what it says of another job is not") {
  const char* inherited[] = {"HOME=/home/me",
                             "EMPTY=",
                             "RANK=7",
                             "LOCAL_RANK=7",
                             "WORLD_SIZE=70",
                             "MASTER_ADDR=elsewhere",
                             "MASTER_PORT=1",
                             "DDP_MASTER_LISTEN_FD=55",
                             "TORCHELASTIC_RUN_ID=x",
                             nullptr};
  const Job job = job_with(Options{});
  const Master master = local_master();
  WorkerEnvironment environment(inherited, job, master, 0);
  const Variables variables = read(environment.of(0));
  CHECK(variables.at("HOME") == "/home/me");
  CHECK(variables.at("EMPTY").empty());
  CHECK(variables.at("RANK") == "0");
  CHECK(variables.at("LOCAL_RANK") == "0");
  CHECK(variables.at("WORLD_SIZE") == "1");
  CHECK(variables.at("MASTER_ADDR") == "127.0.0.1");
  CHECK(variables.at("MASTER_PORT") == "4321");
  CHECK(variables.count("DDP_MASTER_LISTEN_FD") == 0);
  CHECK(variables.at("TORCHELASTIC_RUN_ID") != "x");
}

TEST_CASE("the user's own settings win") {
  const char* inherited[] = {"OMP_NUM_THREADS=5", "GLOO_SOCKET_IFNAME=eth7",
                             "TORCH_NCCL_ASYNC_ERROR_HANDLING=0", nullptr};
  Options options;
  options.nproc_per_node = 2;
  const Job job = job_with(options);
  const Master master = local_master();
  WorkerEnvironment environment(inherited, job, master, 0);
  const Variables variables = read(environment.of(1));
  CHECK(variables.at("OMP_NUM_THREADS") == "5");
  CHECK(variables.at("GLOO_SOCKET_IFNAME") == "eth7");
  CHECK(variables.at("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0");
}

TEST_CASE("malloc is tuned where that is asked for, but for what the user has set") {
  Options options;
  Master master = local_master();
  const char* const inherited[] = {"MALLOC_TOP_PAD_=1000", nullptr};
  const Job plain = job_with(options);
  WorkerEnvironment untouched(inherited, plain, master, 0);
  CHECK(read(untouched.of(0)).count("MALLOC_MMAP_MAX_") == 0);
  options.tune_malloc = true;
  const Job tuned = job_with(options);
  WorkerEnvironment environment(inherited, tuned, master, 0);
  const Variables variables = read(environment.of(0));
  CHECK(variables.at("MALLOC_MMAP_MAX_") == "0");
  CHECK(variables.at("MALLOC_TRIM_THRESHOLD_") == "4000000000");
  CHECK(variables.at("MALLOC_TOP_PAD_") == "1000");
}

TEST_CASE("threads are divided only where there are several workers, and there is one at least") {
  Options options;
  const Job one = job_with(options);
  WorkerEnvironment alone(kNothing, one, local_master(), 0);
  CHECK(read(alone.of(0)).count("OMP_NUM_THREADS") == 0);
  options.nproc_per_node = available_cores() * 4;
  const Job many = job_with(options);
  WorkerEnvironment crowd(kNothing, many, local_master(), 0);
  CHECK(read(crowd.of(0)).at("OMP_NUM_THREADS") == "1");
}

TEST_CASE("only rank 0 hears of the reserved socket, and all stay on loopback") {
  Options options;
  options.nproc_per_node = 2;
  Master master = local_master();
  master.reserved = UniqueFd(::dup(0));
  const Job job = job_with(options);
  WorkerEnvironment environment(kNothing, job, master, 0);
  const std::string fd = std::to_string(master.reserved.get());
  CHECK(read(environment.of(0)).at(kListenFdVariable) == fd);
  CHECK(read(environment.of(1)).count(kListenFdVariable) == 0);
  CHECK(read(environment.of(1)).at("GLOO_SOCKET_IFNAME") == "lo");
  // The same again: asking for another worker leaves nothing behind.
  CHECK(read(environment.of(0)).at(kListenFdVariable) == fd);
}

TEST_CASE("each run has an id of its own, several nodes have one that all can know") {
  Options options;
  options.command = {"/bin/sh"};
  const auto nothing = [](const char*) -> const char* { return nullptr; };
  const Job one = prepare_job(options, nothing);
  const Job other = prepare_job(options, nothing);
  CHECK(one.run_id.size() == 16);
  CHECK(one.run_id != other.run_id);
  options.run_id = "mine";
  CHECK(prepare_job(options, nothing).run_id == "mine");
  options.run_id.clear();
  options.nnodes = 2;
  options.node_rank = 1;
  options.master_addr = "127.0.0.1";
  CHECK(prepare_job(options, nothing).run_id == "none");
}

TEST_CASE("the error file is named, and an inherited one is not") {
  const char* inherited[] = {"TORCHELASTIC_ERROR_FILE=/outer", nullptr};
  const Job job = job_with(Options{});
  const Master master = local_master();
  WorkerEnvironment environment(inherited, job, master, 0);
  CHECK(read(environment.of(0, "/x")).at("TORCHELASTIC_ERROR_FILE") == "/x");
  CHECK(read(environment.of(0)).count("TORCHELASTIC_ERROR_FILE") == 0);
}

TEST_CASE("a virtual local rank sees one device, as its first") {
  const char* inherited[] = {"CUDA_VISIBLE_DEVICES=5,7", nullptr};
  Options options;
  options.nproc_per_node = 2;
  Job job = job_with(options);
  job.devices = {"5", "7"};
  const Master master = local_master();
  WorkerEnvironment environment(inherited, job, master, 0);
  const Variables variables = read(environment.of(1));
  CHECK(variables.at("CUDA_VISIBLE_DEVICES") == "7");
  CHECK(variables.at("LOCAL_RANK") == "0");
  CHECK(variables.at("RANK") == "1");
}
