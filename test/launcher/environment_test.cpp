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

constexpr const char* kNothing[] = {nullptr};

}  // namespace

TEST_CASE("a worker is told its place") {
  Options options;
  options.nnodes = 3;
  options.node_rank = 1;
  options.nproc_per_node = 2;
  Master master = local_master();
  master.loopback = false;
  WorkerEnvironment environment(kNothing, options, master);
  const Variables expected = {
      {"RANK", "3"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "6"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "3"},
      {"ROLE_RANK", "3"},
      {"ROLE_WORLD_SIZE", "6"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "4321"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_RUN_ID", "none"},
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
  WorkerEnvironment environment(inherited, Options{}, local_master());
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
  WorkerEnvironment environment(inherited, options, local_master());
  const Variables variables = read(environment.of(1));
  CHECK(variables.at("OMP_NUM_THREADS") == "5");
  CHECK(variables.at("GLOO_SOCKET_IFNAME") == "eth7");
  CHECK(variables.at("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0");
}

TEST_CASE("threads are divided only where there are several workers, and there is one at least") {
  Options options;
  WorkerEnvironment alone(kNothing, options, local_master());
  CHECK(read(alone.of(0)).count("OMP_NUM_THREADS") == 0);
  options.nproc_per_node = available_cores() * 4;
  WorkerEnvironment crowd(kNothing, options, local_master());
  CHECK(read(crowd.of(0)).at("OMP_NUM_THREADS") == "1");
}

TEST_CASE("only rank 0 hears of the reserved socket, and all stay on loopback") {
  Options options;
  options.nproc_per_node = 2;
  Master master = local_master();
  master.reserved = UniqueFd(::dup(0));
  WorkerEnvironment environment(kNothing, options, master);
  const std::string fd = std::to_string(master.reserved.get());
  CHECK(read(environment.of(0)).at(kListenFdVariable) == fd);
  CHECK(read(environment.of(1)).count(kListenFdVariable) == 0);
  CHECK(read(environment.of(1)).at("GLOO_SOCKET_IFNAME") == "lo");
  // The same again: asking for another worker leaves nothing behind.
  CHECK(read(environment.of(0)).at(kListenFdVariable) == fd);
}

TEST_CASE("each run has an id of its own, the same for its workers") {
  Options options;
  options.nproc_per_node = 2;
  WorkerEnvironment one(kNothing, options, local_master());
  WorkerEnvironment other(kNothing, options, local_master());
  const std::string id = read(one.of(0)).at("TORCHELASTIC_RUN_ID");
  CHECK(id.size() == 16);
  CHECK(read(one.of(1)).at("TORCHELASTIC_RUN_ID") == id);
  CHECK(read(other.of(0)).at("TORCHELASTIC_RUN_ID") != id);
}
