// Elastic jobs: several real launchers on one machine, each a node, with a real store.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <launcher/descendants.h>
#include <launcher/unique_fd.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

using Words = std::vector<std::string>;
using Process = std::unique_ptr<LaunchProcess>;

/// Quick, so that tests are; on a busy machine still long enough for who is alive.
const std::string kConf =
    "last_call_timeout=0,keep_alive_interval=0.5,keep_alive_max_attempt=6,join_timeout=60";

/// The nodes of one job. Their workers share the folder $JOB.
class Cluster {
 public:
  explicit Cluster(std::string nodes, Words options = {})
      : nodes_(std::move(nodes)), options_(std::move(options)), held_(hold_port()) {
    const char* base = std::getenv("TMPDIR");
    folder_ = std::string(base != nullptr ? base : "/tmp") + "/launch-elastic-XXXXXX";
    REQUIRE(::mkdtemp(folder_.data()) != nullptr);
  }
  ~Cluster() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  /// Starts a launcher whose workers run `script`; what is in `more` wins over the job's options.
  Process start(const std::string& script, const Words& more = {}) const {
    return start_words({"--use_env", "/bin/sh", "-c", script}, more);
  }

  /// The same, and waits until this launcher serves the rendezvous.
  Process start_host(const std::string& script, const Words& more = {}) const {
    Process host = start(script, more);
    await("the host serves the rendezvous", [&] { return is_served(); });
    return host;
  }

  /// A launcher of another program.
  Process start_program(const std::string& path) const { return start_words({path}, {}); }

  const std::string& folder() const { return folder_; }
  bool has(const std::string& file) const { return std::filesystem::exists(folder_ + "/" + file); }
  void write(const std::string& file) const { std::ofstream(folder_ + "/" + file) << "\n"; }
  void await_file(const std::string& file) const {
    await(("there is a file " + file).c_str(), [&] { return has(file); });
  }
  size_t count(const std::string& beginning) const {
    size_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().filename().string().rfind(beginning, 0) == 0) ++found;
    }
    return found;
  }
  std::string read(const std::string& file) const {
    std::ostringstream text;
    text << std::ifstream(folder_ + "/" + file).rdbuf();
    return text.str();
  }

 private:
  Process start_words(const Words& command, const Words& more) const {
    Words words = {"--nnodes=" + nodes_, "--rdzv_backend=c10d",
                   "--rdzv_endpoint=127.0.0.1:" + std::to_string(port_), "--rdzv_conf=" + kConf,
                   "--grace_period=10"};
    words.insert(words.end(), options_.begin(), options_.end());
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), command.begin(), command.end());
    LaunchProcess::Setup setup;
    setup.environment = {{"JOB", folder_}, {"WORKER", worker_program()}};
    return std::make_unique<LaunchProcess>(words, setup);
  }

  ddp::launcher::UniqueFd hold_port() {
    ddp::launcher::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
    port_ = ntohs(address.sin_port);
    return fd;
  }

  bool is_served() const {
    const ddp::launcher::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port_);
    return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }

  std::string nodes_;
  Words options_;
  uint16_t port_ = 0;
  ddp::launcher::UniqueFd held_;
  std::string folder_;
};

void expect(LaunchProcess& node, int status) {
  const int ended = node.wait();
  INFO(node.errors());
  CHECK(ended == status);
  CHECK(node.none_left());
}

void send(const LaunchProcess& node, int signal) { REQUIRE(::kill(node.pid(), signal) == 0); }

/// The process of a launcher that talks to the store.
pid_t agent_of(const LaunchProcess& node) {
  pid_t found = 0;
  await("the launcher has its agent", [&] {
    for (const auto& process : ddp::launcher::descendants_of(node.pid())) {
      std::ifstream file("/proc/" + std::to_string(process.pid) + "/comm");
      std::string name;
      std::getline(file, name);
      if (process.parent == node.pid() && name == "ddp-rendezvous") found = process.pid;
    }
    return found != 0;
  });
  return found;
}

/// Kills a whole node at once, so that nobody of it says anything any more.
void cut_power(const LaunchProcess& node) {
  const pid_t agent = agent_of(node);
  // Stopped first: whichever is killed last would else see the other's end.
  REQUIRE(::kill(agent, SIGSTOP) == 0);
  send(node, SIGSTOP);
  await("the node is stopped",
        [&] { return process_state(agent) == 'T' && process_state(node.pid()) == 'T'; });
  REQUIRE(::kill(agent, SIGKILL) == 0);
  send(node, SIGKILL);
}

/// Says where it is, and stays until it is told to end or there is a file `end`.
const std::string kHold =
    "echo > $JOB/at.$WORLD_SIZE.$RANK.$TORCHELASTIC_RESTART_COUNT\n"
    "until [ -e $JOB/end ]; do sleep 0.02; done";

/// Ends once the job has two workers; before, it stays.
const std::string kUntilTwo =
    "echo > $JOB/at.$WORLD_SIZE.$RANK.$TORCHELASTIC_RESTART_COUNT\n"
    "[ $WORLD_SIZE = 2 ] && exec $WORKER meet any\n"
    "exec sleep 300";

}  // namespace

TEST_CASE("elastic: the same command on every node gives ranks, sizes and a place to meet") {
  const Cluster job("3", {"--nproc_per_node=2", "--rdzv_id=some"});
  const std::string script =
      "echo $GROUP_RANK $LOCAL_RANK $WORLD_SIZE $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE "
      "$TORCHELASTIC_RUN_ID $MASTER_ADDR > $JOB/rank.$RANK\n"
      "echo $MASTER_PORT > $JOB/port.$RANK\n"
      "exec $WORKER meet any";
  std::vector<Process> nodes;
  for (int i = 0; i < 3; ++i) nodes.push_back(job.start(script));
  for (const Process& node : nodes) expect(*node, 0);
  for (int rank = 0; rank < 6; ++rank) {
    const std::string r = std::to_string(rank);
    CHECK(job.read("rank." + r) == std::to_string(rank / 2) + " " + std::to_string(rank % 2) +
                                       " 6 3 " + r + " 6 some 127.0.0.1\n");
    CHECK(job.read("port." + r) == job.read("port.0"));
  }
}

TEST_CASE("elastic: nodes may have different numbers of workers") {
  const Cluster job("2");
  const std::string script =
      "echo $LOCAL_WORLD_SIZE > $JOB/at.$WORLD_SIZE.$RANK\nexec $WORKER meet any";
  const Process host = job.start_host(script, {"--nproc_per_node=1"});
  const Process other = job.start(script, {"--nproc_per_node=3"});
  expect(*host, 0);
  expect(*other, 0);
  CHECK(job.read("at.4.0") == "1\n");
  for (const std::string rank : {"1", "2", "3"}) CHECK(job.read("at.4." + rank) == "3\n");
}

TEST_CASE("elastic: rank 0 alone inherits the socket of its port, on all addresses") {
  const Cluster job("2", {"--nproc_per_node=2"});
  const std::string script = "$WORKER sockets own && exec $WORKER meet adopt";
  const Process host = job.start_host(script);
  const Process other = job.start(script);
  expect(*host, 0);
  expect(*other, 0);
  CHECK_THAT(host->output(), ContainsSubstring("rank 0 announced=yes 1"));
  CHECK_THAT(host->output(), ContainsSubstring("rank 1 announced=no 0"));
  CHECK_THAT(other->output(), ContainsSubstring("rank 2 announced=no 0"));
}

TEST_CASE("elastic: a failure restarts all nodes, with one count and a fresh port") {
  const Cluster job("2", {"--nproc_per_node=2", "--max_restarts=3"});
  const std::string script =
      "n=$TORCHELASTIC_RESTART_COUNT\n"
      "echo $MASTER_PORT > $JOB/port.$n.$RANK\n"
      "[ $n = 2 ] && exec $WORKER meet any\n"
      "if [ $RANK = $((3 - n)) ]; then\n"
      "  until [ -e $JOB/port.$n.0 ] && [ -e $JOB/port.$n.1 ] && [ -e $JOB/port.$n.2 ] &&\n"
      "    [ -e $JOB/port.$n.3 ]; do sleep 0.01; done; exit 4\n"
      "fi\n"
      "exec sleep 300";
  const Process host = job.start_host(script);
  const Process other = job.start(script);
  expect(*host, 0);
  expect(*other, 0);
  for (const std::string n : {"0", "1", "2"}) {
    for (const std::string rank : {"1", "2", "3"})
      CHECK(job.read("port." + n + "." + rank) == job.read("port." + n + ".0"));
  }
  CHECK(job.read("port.0.0") != job.read("port.1.0"));
  CHECK_FALSE(job.has("port.3.0"));
  // Both say what happened, wherever it did.
  for (const Process& node : {std::cref(host), std::cref(other)}) {
    CHECK_THAT(node->errors(), ContainsSubstring("rank 3 (local rank 1, pid"));
    CHECK_THAT(node->errors(), ContainsSubstring("on node 1 (127.0.0.1) exited with code 4"));
    CHECK_THAT(node->errors(), ContainsSubstring("(restart 1 of 3)"));
    CHECK_THAT(node->errors(), ContainsSubstring("(restart 2 of 3)"));
  }
}

TEST_CASE("elastic: workers that fail because others did use up no restart") {
  const Cluster job("2", {"--max_restarts=1"});
  // Rank 0 fails as well, as soon as rank 1 has.
  const std::string script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec $WORKER meet any\n"
      "echo > $JOB/ready.$RANK\n"
      "until [ -e $JOB/ready.0 ] && [ -e $JOB/ready.1 ]; do sleep 0.01; done\n"
      "exit $((RANK + 5))";
  const Process host = job.start_host(script);
  const Process other = job.start(script);
  expect(*host, 0);
  expect(*other, 0);
}

TEST_CASE("elastic: without restarts left all nodes end with the first failure's status") {
  const Cluster job("3");
  const std::string script =
      "echo > $JOB/ready.$RANK\n"
      "until [ -e $JOB/ready.0 ] && [ -e $JOB/ready.1 ] && [ -e $JOB/ready.2 ]; do\n"
      "  sleep 0.01\n"
      "done\n"
      "[ $RANK = 2 ] && exit 9\n"
      "exec sleep 300";
  std::vector<Process> nodes;
  for (int i = 0; i < 3; ++i) nodes.push_back(job.start(script));
  for (const Process& node : nodes) {
    expect(*node, 9);
    CHECK_THAT(node->errors(), ContainsSubstring("rank 2 (local rank 0, pid"));
    CHECK_THAT(node->errors(), ContainsSubstring("on node 2 (127.0.0.1) exited with code 9"));
    CHECK_THAT(node->errors(), ContainsSubstring("exit status: 9"));
  }
}

TEST_CASE("elastic: a late node is let in, and a node that leaves is let go, at no cost") {
  const Cluster job("1:3");
  const Process host = job.start_host(kHold);
  job.await_file("at.1.0.0");
  const Process other = job.start(kHold);
  job.await_file("at.2.1.0");
  const Process third = job.start(kHold);
  job.await_file("at.3.2.0");
  send(*other, SIGTERM);
  expect(*other, 143);
  CHECK_THAT(other->errors(), ContainsSubstring("received SIGTERM"));
  await("the others go on", [&] {
    return host->errors().find("has left the job (SIGTERM)") != std::string::npos &&
           third->errors().find("has left the job (SIGTERM)") != std::string::npos;
  });
  // It returns.
  std::filesystem::remove(job.folder() + "/at.3.2.0");
  const Process again = job.start(kHold);
  job.await_file("at.3.2.0");
  job.write("end");
  expect(*host, 0);
  expect(*third, 0);
  expect(*again, 0);
  CHECK(job.count("at.3.") == 3);
  CHECK_THAT(host->errors(), ContainsSubstring("has joined"));
}

TEST_CASE("elastic: each round has files of its own") {
  const Cluster job("1:2", {"--rdzv_id=run", "--redirects=1"});
  const Words logs = {"--log_dir", job.folder() + "/logs"};
  const std::string script = "echo world $WORLD_SIZE\n" + kUntilTwo;
  const Process host = job.start_host(script, logs);
  job.await_file("at.1.0.0");
  const Process other = job.start(script, logs);
  expect(*host, 0);
  expect(*other, 0);
  CHECK(job.read("logs/run/attempt_0/0/stdout.log") == "world 1\n");
  CHECK(job.read("logs/run/attempt_1/0/stdout.log") == "world 2\n");
  CHECK(job.read("logs/run/attempt_1/1/stdout.log") == "world 2\n");
}

TEST_CASE("elastic: a silent node is noticed by its keep-alive, and may come back") {
  const Cluster job("1:2");
  const Process host = job.start_host(kHold);
  const Process other = job.start(kHold);
  job.await_file("at.2.1.0");
  std::filesystem::remove_all(job.folder() + "/at.1.0.0");
  cut_power(*other);
  CHECK(other->wait() == 137);
  job.await_file("at.1.0.0");
  CHECK_THAT(host->errors(), ContainsSubstring("gave no sign of life for 3 s"));
  std::filesystem::remove(job.folder() + "/at.2.1.0");
  const Process again = job.start(kHold);
  job.await_file("at.2.1.0");
  job.write("end");
  expect(*host, 0);
  expect(*again, 0);
  CHECK(other->none_left());
}

TEST_CASE("elastic: a launcher or guardian that is killed is noticed at once") {
  // A keep-alive that would never be missed in this test.
  const Cluster job("1:2", {"--rdzv_conf=last_call_timeout=0,keep_alive_interval=1000"});
  const Process host = job.start_host(kHold);
  for (const bool guardian : {false, true}) {
    std::filesystem::remove_all(job.folder() + "/at.2.1.0");
    const Process other = job.start(kHold);
    job.await_file("at.2.1.0");
    std::filesystem::remove_all(job.folder() + "/at.1.0.0");
    if (guardian) {
      REQUIRE(::kill(other->guardian(), SIGKILL) == 0);
    } else {
      send(*other, SIGKILL);
    }
    CHECK(other->wait() == 137);
    job.await_file("at.1.0.0");
    CHECK(other->none_left());
  }
  CHECK_THAT(host->errors(), ContainsSubstring("its launcher ended without a word"));
  job.write("end");
  expect(*host, 0);
}

TEST_CASE("elastic: a node too many waits for a place, takes it, and ends with the job") {
  const Cluster job("1:2");
  const Process host = job.start_host(kHold);
  const Process other = job.start(kHold);
  job.await_file("at.2.1.0");
  const Process third = job.start("echo > $JOB/third\n" + kHold);
  const Process fourth = job.start("echo > $JOB/fourth\nexit 3");
  for (const Process& spare : {std::cref(third), std::cref(fourth)}) {
    await("it waits",
          [&] { return spare->errors().find("waiting for a place") != std::string::npos; });
  }
  CHECK_FALSE(job.has("third"));
  send(*fourth, SIGINT);
  expect(*fourth, 130);
  send(*other, SIGINT);
  expect(*other, 130);
  job.await_file("third");
  const Process fifth = job.start("echo > $JOB/fifth\nexit 3");
  await("it waits",
        [&] { return fifth->errors().find("waiting for a place") != std::string::npos; });
  job.write("end");
  expect(*host, 0);
  expect(*third, 0);
  expect(*fifth, 0);
  CHECK_FALSE(job.has("fourth"));
  CHECK_FALSE(job.has("fifth"));
}

TEST_CASE("elastic: a node whose workers are done waits for the others, and hears signals") {
  const Cluster job("2:3");
  const std::string script =
      "echo $$ > $JOB/pid.$RANK; echo > $JOB/ready.$RANK; [ $RANK = 2 ] && exit 0\n"
      "until [ -e $JOB/end ]; do sleep 0.02; done";
  const Process host = job.start_host(script, {"--rdzv_conf=last_call_timeout=60"});
  const Process first = job.start(script);
  const Process second = job.start(script);
  for (const std::string rank : {"0", "1", "2"}) job.await_file("ready." + rank);
  // Whichever has rank 2 has no worker any more, knows it, and is there.
  const pid_t worker = std::stoi(job.read("pid.2"));
  await("the worker has ended", [&] { return process_state(worker) == 0; });
  LaunchProcess* done = nullptr;
  await("a node is done", [&] {
    for (const Process& node : {std::cref(first), std::cref(second)}) {
      if (node->processes().size() == 3) done = node.get();
    }
    return done != nullptr;
  });
  LaunchProcess& working = done == first.get() ? *second : *first;
  send(*done, SIGTERM);
  expect(*done, 143);
  // Its work was done: the others are not disturbed.
  job.write("end");
  expect(*host, 0);
  expect(working, 0);
  CHECK_THAT(host->errors(), !ContainsSubstring("starting all workers"));
}

TEST_CASE("elastic: a lost host ends all the others, with an error that says so") {
  const Cluster job("1:3");
  const Process host = job.start_host(kHold);
  std::vector<Process> others;
  for (int i = 0; i < 2; ++i) others.push_back(job.start(kHold));
  job.await_file("at.3.2.0");
  cut_power(*host);
  CHECK(host->wait() == 137);
  for (const Process& other : others) {
    expect(*other, 1);
    CHECK_THAT(other->errors(), ContainsSubstring("the rendezvous at 127.0.0.1:"));
    CHECK_THAT(other->errors(), ContainsSubstring("is lost"));
    CHECK_THAT(other->errors(), ContainsSubstring("The node that serves it has ended"));
  }
  CHECK(host->none_left());
}

TEST_CASE("elastic: a host that is told to end says so to the others, and so does a killed one") {
  for (const int signal : {SIGTERM, SIGKILL}) {
    const Cluster job("1:2");
    const Process host = job.start_host(kHold);
    const Process other = job.start(kHold);
    job.await_file("at.2.1.0");
    send(*host, signal);
    expect(*host, 128 + signal);
    expect(*other, 1);
    CHECK_THAT(other->errors(), ContainsSubstring("which serves the rendezvous, has left the job"));
  }
}

TEST_CASE("elastic: a host that does not answer is given up on") {
  const Cluster job("1:2", {"--rdzv_conf=read_timeout=2," + kConf});
  const Process host = job.start_host(kHold);
  const Process other = job.start(kHold);
  job.await_file("at.2.1.0");
  const pid_t agent = agent_of(*host);
  REQUIRE(::kill(agent, SIGSTOP) == 0);
  expect(*other, 1);
  CHECK_THAT(other->errors(), ContainsSubstring("did not answer within 2 s"));
  REQUIRE(::kill(agent, SIGCONT) == 0);
  job.write("end");
  expect(*host, 0);
}

TEST_CASE("elastic: an agent that is killed alone ends its own node, and not the others") {
  const Cluster job("1:2");
  const Process host = job.start_host(kHold);
  const Process other = job.start(kHold);
  job.await_file("at.2.1.0");
  std::filesystem::remove_all(job.folder() + "/at.1.0.0");
  REQUIRE(::kill(agent_of(*other), SIGKILL) == 0);
  expect(*other, 1);
  CHECK_THAT(other->errors(), ContainsSubstring("ddp-rendezvous"));
  job.await_file("at.1.0.0");
  job.write("end");
  expect(*host, 0);
}

TEST_CASE("elastic: too few nodes are an error after a while, for all that came") {
  const Cluster job("3", {"--rdzv_conf=join_timeout=2"});
  const Process host = job.start_host(kHold);
  const Process other = job.start(kHold);
  for (const Process& node : {std::cref(host), std::cref(other)}) {
    expect(*node, 1);
    CHECK_THAT(node->errors(), ContainsSubstring("of at least 3 nodes came within 2 s"));
  }
  const Cluster nobody("2", {"--rdzv_conf=join_timeout=0.5,is_host=0"});
  const Process alone = nobody.start(kHold);
  expect(*alone, 1);
  CHECK_THAT(alone->errors(), ContainsSubstring("nobody serves the rendezvous at 127.0.0.1:"));
}

TEST_CASE("elastic: signals end a node that waits, for others or for the host") {
  const Cluster job("2");
  const Process host = job.start_host(kHold);
  send(*host, SIGTERM);
  expect(*host, 143);
  const Cluster nobody("2", {"--rdzv_conf=is_host=0"});
  const Process alone = nobody.start(kHold);
  agent_of(*alone);
  send(*alone, SIGINT);
  expect(*alone, 130);
  CHECK(alone->seconds() < 30);
  const Cluster nameless("2", {"--rdzv_endpoint=no-such-host.invalid"});
  const Process asking = nameless.start(kHold);
  await("it asks for the name",
        [&] { return asking->errors().find("no-such-host.invalid") != std::string::npos; });
  send(*asking, SIGTERM);
  expect(*asking, 143);
  const Cluster limited("2", {"--timeout=0.5", "--rdzv_conf=is_host=0"});
  const Process late = limited.start(kHold);
  expect(*late, 124);
}

TEST_CASE("elastic: the time limit of one node is that of the job") {
  const Cluster job("2");
  const Process host = job.start_host(kHold, {"--timeout=2"});
  const Process other = job.start(kHold);
  expect(*host, 124);
  expect(*other, 124);
  CHECK_THAT(other->errors(), ContainsSubstring("--timeout"));
}

TEST_CASE("elastic: a program that cannot be started on one node ends the job") {
  const Cluster job("2", {"--max_restarts=3"});
  const Process host = job.start_host(kHold);
  job.write("text");
  std::filesystem::permissions(job.folder() + "/text", std::filesystem::perms::owner_all);
  std::ofstream(job.folder() + "/text") << "no program\n";
  const Process other = job.start_program(job.folder() + "/text");
  expect(*other, 126);
  expect(*host, 126);
  CHECK_THAT(host->errors(), ContainsSubstring("could not be started"));
  CHECK_THAT(host->errors(), !ContainsSubstring("restart 1"));
}

TEST_CASE("elastic: what does not belong together is told apart") {
  const Cluster job("2", {"--rdzv_id=one"});
  const Process host = job.start_host(kUntilTwo);
  const Process stranger = job.start(kUntilTwo, {"--rdzv_id=two"});
  expect(*stranger, 1);
  CHECK_THAT(stranger->errors(), ContainsSubstring("its --rdzv_id is 'one'"));
  const Process greedy = job.start(kUntilTwo, {"--nnodes=2:3"});
  expect(*greedy, 1);
  CHECK_THAT(greedy->errors(), ContainsSubstring("--nnodes=2:3"));
  const Process second_host = job.start(kUntilTwo, {"--rdzv_conf=is_host=1"});
  expect(*second_host, 1);
  CHECK_THAT(second_host->errors(), ContainsSubstring("in use"));
  const Process right = job.start(kUntilTwo);
  expect(*right, 0);
  expect(*host, 0);
}

TEST_CASE("elastic: without the store's library it is said what to do") {
  LaunchProcess::Setup setup;
  setup.environment = {{"DDP_RENDEZVOUS_STORE", "/nowhere/store.so"}};
  LaunchProcess job(with_script({"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1"},
                                "echo > $DIR/started"),
                    setup);
  CHECK(job.wait() == 1);
  CHECK_THAT(job.errors(), ContainsSubstring("DDP_RENDEZVOUS_STORE=/nowhere/store.so"));
  CHECK_THAT(job.errors(), ContainsSubstring("DDP_BUILD_LIBRARY"));
  CHECK_THAT(job.errors(), ContainsSubstring("static"));
  CHECK_FALSE(job.has("started"));
  setup.environment = {{"DDP_RENDEZVOUS_STORE", worker_program()}};
  LaunchProcess wrong(
      with_script({"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:1"}, "exit 0"),
      setup);
  CHECK(wrong.wait() == 1);
  CHECK_THAT(wrong.errors(), ContainsSubstring("cannot open"));
}

TEST_CASE("elastic: what is started is shown without meeting anybody") {
  LaunchProcess job({"--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_endpoint=somewhere:77",
                     "--dry_run", "/bin/true"});
  CHECK(job.wait() == 0);
  CHECK_THAT(job.output(), ContainsSubstring("1 to 2 nodes that meet at somewhere:77"));
}
