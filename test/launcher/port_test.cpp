// Where the workers meet: ports in use, jobs side by side, the reserved socket. (Case C24.)

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include <launcher/unique_fd.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;
using ddp::launcher::UniqueFd;

namespace {

const std::string kTwo = "--nproc_per_node=2";

struct BoundSocket {
  UniqueFd fd;
  std::string port;
};

BoundSocket bind_any_port(in_addr_t where) {
  BoundSocket bound{UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), ""};
  const int on = 1;
  ::setsockopt(bound.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(where);
  socklen_t length = sizeof(address);
  REQUIRE(::bind(bound.fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(::getsockname(bound.fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  bound.port = std::to_string(ntohs(address.sin_port));
  return bound;
}

}  // namespace

TEST_CASE("a port in use is named before any worker starts") {
  for (const in_addr_t where : {INADDR_LOOPBACK, INADDR_ANY}) {
    const BoundSocket taken = bind_any_port(where);
    REQUIRE(::listen(taken.fd.get(), 1) == 0);
    for (const std::string address : {"", "127.0.0.1"}) {
      std::vector<std::string> options{kTwo, "--master_port", taken.port};
      if (!address.empty()) options.push_back("--master_addr=" + address);
      LaunchProcess job(with_script(options, "echo > $DIR/started"));
      CHECK(job.wait() == 1);
      CHECK_THAT(job.errors(), ContainsSubstring("127.0.0.1:" + taken.port));
      CHECK_THAT(job.errors(), ContainsSubstring("in use"));
      CHECK_FALSE(job.has("started"));
      CHECK(job.none_left());
    }
  }
}

TEST_CASE("jobs side by side never collide, whether they know of the reserved socket or not") {
  std::vector<std::unique_ptr<LaunchProcess>> jobs;
  for (int i = 0; i < 3; ++i) {
    for (const std::string way : {"adopt", "plain", "any"}) {
      jobs.push_back(std::make_unique<LaunchProcess>(
          std::vector<std::string>{kTwo, "--use_env", worker_program(), "meet", way}));
    }
  }
  for (const auto& job : jobs) {
    const int status = job->wait();
    INFO(job->errors());
    CHECK(status == 0);
  }
}

TEST_CASE("a given port is used") {
  // Held as the launcher does it, so that no other test gets it.
  const BoundSocket held = bind_any_port(INADDR_LOOPBACK);
  LaunchProcess job({kTwo, "--use_env", "--master_port=" + held.port, "/bin/sh", "-c",
                     "[ \"$MASTER_ADDR:$MASTER_PORT\" = 127.0.0.1:" + held.port + " ] && exec " +
                         worker_program() + " meet plain"});
  const int status = job.wait();
  INFO(job.errors());
  CHECK(status == 0);
}

TEST_CASE("an address alone gets a port on it") {
  LaunchProcess job({kTwo, "--use_env", "--master_addr=127.0.0.2", "/bin/sh", "-c",
                     "[ $MASTER_ADDR = 127.0.0.2 ] && exec " + worker_program() + " meet adopt"});
  const int status = job.wait();
  INFO(job.errors());
  CHECK(status == 0);
  LaunchProcess stranger({"--master_addr=192.0.2.1", "true"});  // an address for documentation
  CHECK(stranger.wait() == 1);
  CHECK_THAT(stranger.errors(), ContainsSubstring("192.0.2.1"));
}

TEST_CASE("the reserved socket is inherited by rank 0 alone") {
  LaunchProcess job({"--nproc_per_node=3", "--use_env", worker_program(), "sockets", "own"});
  CHECK(job.wait() == 0);
  CHECK_THAT(job.output(), ContainsSubstring("rank 0 announced=yes 1\n"));
  CHECK_THAT(job.output(), ContainsSubstring("rank 1 announced=no 0\n"));
  CHECK_THAT(job.output(), ContainsSubstring("rank 2 announced=no 0\n"));
}

TEST_CASE("a launcher under a launcher keeps the outer one's socket to itself") {
  LaunchProcess job({"--use_env", "/bin/sh", "-c",
                     "exec " DDP_LAUNCH_FOLDER "/launch --nproc_per_node=2 --use_env " +
                         worker_program() + " sockets own $MASTER_PORT"});
  CHECK(job.wait() == 0);
  CHECK_THAT(job.output(), ContainsSubstring("rank 0 announced=yes 1 0\n"));
  CHECK_THAT(job.output(), ContainsSubstring("rank 1 announced=no 0 0\n"));
}

TEST_CASE("several nodes: the launchers together make one job") {
  const BoundSocket held = bind_any_port(INADDR_LOOPBACK);
  std::vector<std::unique_ptr<LaunchProcess>> nodes;
  for (const std::string node : {"1", "0"}) {
    nodes.push_back(std::make_unique<LaunchProcess>(std::vector<std::string>{
        kTwo, "--nnodes=2", "--node_rank=" + node, "--master_addr=127.0.0.1",
        "--master_port=" + held.port, "--use_env", "/bin/sh", "-c",
        "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE; exec " +
            worker_program() + " meet plain"}));
  }
  for (const auto& node : nodes) {
    const int status = node->wait();
    INFO(node->errors());
    CHECK(status == 0);
  }
  CHECK_THAT(nodes[0]->output(), ContainsSubstring("2 0 1 4 2\n"));
  CHECK_THAT(nodes[0]->output(), ContainsSubstring("3 1 1 4 2\n"));
  CHECK_THAT(nodes[1]->output(), ContainsSubstring("0 0 0 4 2\n"));
  CHECK_THAT(nodes[1]->output(), ContainsSubstring("1 1 0 4 2\n"));
}
