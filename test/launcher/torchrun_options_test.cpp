// The options that are torchrun's, the environment behind them, and batch systems.

#include <signal.h>

#include <chrono>
#include <string>

#include <launcher/batch_system.h>
#include <launcher/option_table.h>
#include <launcher/rendezvous.h>

#include "catch2.h"
#include "parse.h"

using namespace ddp::launcher;
using namespace ddp::launcher::test;

namespace {

void check_refused(const Words& words, const Words& said, const Variables& variables = {}) {
  const Error error = refused(words, variables);
  INFO(error.what());
  CHECK(error.status() == 2);
  for (const std::string& text : said) CHECK_THAT(error.what(), ContainsSubstring(text));
}

/// What srun gives the launcher of the second of three nodes.
const Variables kSlurm = {
    {"SLURM_STEP_NUM_NODES", "3"},    {"SLURM_NODEID", "1"},  {"SLURM_STEP_NODELIST", "n[07-09]"},
    {"SLURM_STEP_NUM_TASKS", "3"},    {"SLURM_JOB_ID", "42"}, {"SLURM_STEP_ID", "2"},
    {"SLURM_JOB_NODELIST", "n[1-9]"}, {"SLURM_NNODES", "9"},
};

}  // namespace

TEST_CASE("every option has a variable behind it, and the command line wins") {
  CHECK(parse({"p"}, {{"PET_NPROC_PER_NODE", "3"}}).nproc_per_node == 3);
  CHECK(parse({"--nproc-per-node=2", "p"}, {{"PET_NPROC_PER_NODE", "3"}}).nproc_per_node == 2);
  CHECK(parse({"p"}, {{"PET_NPROC_PER_NODE", ""}}).nproc_per_node == 1);
  CHECK(parse({"p"}, {{"PET_USE_ENV", "1"}}).use_env);
  CHECK_FALSE(parse({"p"}, {{"PET_USE_ENV", "0"}}).use_env);
  CHECK(parse({"--use_env", "p"}, {{"PET_USE_ENV", "0"}}).use_env);
  CHECK(parse({"p"}, {{"PET_GRACE_PERIOD", "2"}}).grace_period.count() == 2000);
  const Options nodes = parse({"--node-rank=1", "p"}, {{"PET_NNODES", "2"},
                                                       {"PET_NODE_RANK", "0"},
                                                       {"PET_MASTER_ADDR", "a"},
                                                       {"PET_MASTER_PORT", "7"}});
  CHECK(nodes.nnodes == 2);
  CHECK(nodes.node_rank == 1);
  CHECK(nodes.master_addr == "a");
  CHECK(nodes.master_port == 7);
  check_refused({"p"}, {"PET_NNODES", "'many'"}, {{"PET_NNODES", "many"}});
  check_refused({"p"}, {"PET_STANDALONE", "'maybe'"}, {{"PET_STANDALONE", "maybe"}});
}

TEST_CASE("a range of nodes is taken where it is none") {
  CHECK(parse({"--nnodes=1:1", "p"}).nnodes == 1);
  CHECK(parse({"--nnodes=3:3", "--master_addr=x", "p"}).nnodes == 3);
  check_refused({"--nnodes=1:3", "--master_addr=x", "p"}, {"--nnodes=1:3", "--rdzv_backend=c10d"});
  for (const std::string text : {"0:1", "2:1", ":", "1:", ":2", "1:2:3", "a:b", "0"})
    check_refused({"--nnodes=" + text, "p"}, {"--nnodes", "'" + text + "'"});
}

TEST_CASE("the static rendezvous is the master's address by another name") {
  const Words two = {"--nnodes=2", "--node_rank=1"};
  const auto with = [&](Words words) {
    words.insert(words.begin(), two.begin(), two.end());
    words.push_back("p");
    return words;
  };
  const Options both = parse(with({"--rdzv-endpoint=h:1234"}));
  CHECK(both.master_addr == "h");
  CHECK(both.master_port == 1234);
  CHECK(parse(with({"--rdzv_endpoint", "h"})).master_port == 0);
  const Options mixed =
      parse(with({"--rdzv_backend=static", "--rdzv_endpoint=h", "--master_port=5"}));
  CHECK(mixed.master_addr == "h");
  CHECK(mixed.master_port == 5);
  CHECK(parse(with({"--rdzv_endpoint=h:1", "--master_addr=h", "--master_port=1"})).master_port ==
        1);
  CHECK(parse(with({"--rdzv_endpoint=h"}), {{"PET_MASTER_ADDR", "x"}}).master_addr == "h");
  CHECK(parse(with({"--master_addr=h"}), {{"PET_RDZV_ENDPOINT", "x:1"}}).master_addr == "h");
  check_refused(with({"--rdzv_endpoint=h", "--master_addr=x"}), {"contradict"});
  check_refused(with({"--rdzv_endpoint=h:1", "--master_addr=h", "--master_port=2"}),
                {"contradict"});
  for (const std::string text : {"h:", ":1", "h:0", "h:65536", "h:x", "[::1", "[::1]1", "[]:1"})
    check_refused(with({"--rdzv_endpoint=" + text}), {"--rdzv_endpoint", "'" + text + "'"});
  check_refused(with({"--rdzv_backend=etcd", "--master_addr=h"}), {"--rdzv_backend", "'etcd'"});
}

TEST_CASE("an endpoint's host and port") {
  const auto check = [](const char* text, const char* host, const char* port) {
    const auto endpoint = parse_endpoint(text);
    REQUIRE(endpoint);
    CHECK(endpoint->host == host);
    CHECK(endpoint->port == port);
  };
  check("h", "h", "");
  check("h:1", "h", "1");
  check("[::1]:22", "::1", "22");
  check("[::1]", "::1", "");
  check("fe80::1", "fe80::1", "");
}

TEST_CASE("one node as people write it for torchrun") {
  for (const Words& words :
       {Words{"--standalone", "p"}, Words{"--standalone", "--nnodes=1", "p"},
        Words{"--standalone", "--rdzv-endpoint=x:0", "--master_addr=y", "--rdzv_id=z", "p"},
        Words{"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "p"},
        Words{"--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=somewhere:29400", "p"},
        Words{"--nnodes=1", "--rdzv-backend=c10d", "p"}}) {
    const Options options = parse(words, kSlurm);
    CHECK(options.nnodes == 1);
    CHECK(options.master_addr.empty());
    CHECK(options.master_port == 0);
    CHECK(options.run_id.empty());
  }
  CHECK(parse({"--rdzv-backend=c10d", "p"}).nnodes == 1);
  CHECK(parse({"--rdzv-backend=c10d", "--rdzv_id=z", "p"}).run_id == "z");
  CHECK(parse({"p"}, {{"PET_STANDALONE", "1"}, {"PET_MASTER_ADDR", "x"}}).master_addr.empty());
  check_refused({"--standalone", "--nnodes=2", "p"}, {"--standalone", "one node"});
  check_refused({"--standalone", "--node_rank=1", "p"}, {"--standalone", "one node"});
}

TEST_CASE("several nodes with c10d are an elastic job") {
  const auto elastic = [](Words words, const Variables& variables = {}) {
    words.insert(words.begin(), "--rdzv-backend=c10d");
    words.push_back("p");
    return parse(words, variables);
  };
  CHECK_FALSE(parse({"--nnodes=2", "--master_addr=x", "p"}).elastic);
  CHECK_FALSE(elastic({"--nnodes=1:1", "--rdzv_endpoint=h"}).elastic);
  const Options fixed = elastic({"--nnodes=2", "--rdzv_endpoint=h", "--nproc_per_node=3"});
  REQUIRE(fixed.elastic);
  CHECK(fixed.elastic->least == 2);
  CHECK(fixed.elastic->most == 2);
  CHECK(fixed.elastic->host == "h");
  CHECK(fixed.elastic->port == 29400);
  CHECK_FALSE(fixed.elastic->is_host);
  CHECK(fixed.elastic->join_timeout.count() == 600000);
  CHECK(fixed.elastic->last_call_timeout.count() == 30000);
  CHECK(fixed.elastic->close_timeout.count() == 30000);
  CHECK(fixed.elastic->keep_alive_interval.count() == 5000);
  CHECK(fixed.elastic->keep_alive_max_attempt == 3);
  CHECK(fixed.elastic->read_timeout.count() == 60000);
  const Options range =
      elastic({"--nnodes=1:4", "--rdzv_endpoint=[::1]:77",
               "--rdzv_conf=join_timeout=1,last_call_timeout=0,close_timeout=2.5,is_host=true,"
               "keep_alive_interval=0.5,keep_alive_max_attempt=7,read_timeout=3,store_type=tcp"});
  CHECK(range.elastic->least == 1);
  CHECK(range.elastic->most == 4);
  CHECK(range.elastic->endpoint() == "[::1]:77");
  CHECK(range.elastic->is_host == true);
  CHECK(range.elastic->join_timeout.count() == 1000);
  CHECK(range.elastic->last_call_timeout.count() == 0);
  CHECK(range.elastic->close_timeout.count() == 2500);
  CHECK(range.elastic->keep_alive_interval.count() == 500);
  CHECK(range.elastic->keep_alive_max_attempt == 7);
  CHECK(range.elastic->read_timeout.count() == 3000);
  // Clusters set these for every backend.
  const Options cluster = elastic({"--nnodes=2", "--rdzv_endpoint=h:1"},
                                  {{"PET_NODE_RANK", "1"}, {"PET_MASTER_ADDR", "x"}});
  CHECK(cluster.node_rank == 0);
  CHECK(cluster.master_addr.empty());

  check_refused({"--rdzv_backend=c10d", "--nnodes=2", "p"}, {"--rdzv_endpoint"});
  check_refused({"--rdzv_backend=c10d", "--nnodes=2", "--rdzv_endpoint=h:0", "p"},
                {"--rdzv_endpoint", "not 0"});
  for (const std::string text :
       {"is_host=maybe", "keep_alive_interval=0", "keep_alive_max_attempt=0", "read_timeout=0",
        "last_call_timeout=soon", "store_type=file", "keep_alive=3"}) {
    check_refused(
        {"--rdzv_backend=c10d", "--nnodes=2", "--rdzv_endpoint=h", "--rdzv_conf=" + text, "p"},
        {"--rdzv_conf", text.substr(0, text.find('='))});
  }
}

TEST_CASE("the rendezvous' settings are read, and unknown ones are named") {
  CHECK_FALSE(parse({"p"}).resolve_patience);
  CHECK(parse({"--rdzv-conf=timeout=900,last_call_timeout=3", "p"}).resolve_patience->count() ==
        900);
  CHECK(parse({"--rdzv-conf", "join_timeout=0.5", "p"}).resolve_patience->count() == 1);
  check_refused({"--rdzv-conf=tiemout=3", "p"}, {"--rdzv_conf", "'tiemout'", "timeout"});
  check_refused({"--rdzv-conf=timeout=soon", "p"}, {"timeout", "'soon'"});
  for (const std::string text : {"timeout", "timeout=", "=3", "timeout=3,"})
    check_refused({"--rdzv-conf=" + text, "p"}, {"KEY=VALUE"});
  CHECK(parse({"--rdzv-id=job 7", "p"}).run_id == "job 7");
  for (const std::string text : {"a/b", "..", ".", "a\nb", ""})
    check_refused({"--rdzv-id=" + text, "p"}, {"--rdzv_id"});
}

TEST_CASE("SLURM says what a launcher on each node needs") {
  const Options options = parse({"--nproc_per_node=8", "p"}, kSlurm);
  CHECK(options.nnodes == 3);
  CHECK(options.node_rank == 1);
  CHECK(options.master_addr == "n07");
  CHECK(options.master_port == 15044);
  CHECK(options.run_id == "slurm-42.2");
  CHECK(options.placement().rank(0) == 8);

  const Options overridden = parse(
      {"--nnodes=3", "--node_rank=2", "--master_addr=x", "--master_port=9", "--rdzv_id=i", "p"},
      kSlurm);
  CHECK(overridden.node_rank == 2);
  CHECK(overridden.master_addr == "x");
  CHECK(overridden.master_port == 9);
  CHECK(overridden.run_id == "i");
  CHECK(parse({"--nnodes=3", "p"}, kSlurm).node_rank == 1);
  CHECK(parse({"--nnodes=1", "p"}, kSlurm).node_rank == 0);

  Variables variables = kSlurm;
  variables["PET_MASTER_ADDR"] = "pet";
  CHECK(parse({"p"}, variables).master_addr == "pet");
  variables["TORCHELASTIC_RUN_ID"] = "outer";  // a launcher that a worker has started
  CHECK(parse({"p"}, variables).nnodes == 1);

  variables = kSlurm;
  variables["SLURM_STEP_NUM_TASKS"] = "24";
  check_refused({"p"}, {"24 launchers on 3 nodes", "--ntasks-per-node=1"}, variables);
  CHECK(parse({"--standalone", "p"}, variables).nnodes == 1);

  variables = {{"SLURM_NNODES", "2"},  // a batch script without srun
               {"SLURM_NODEID", "0"},
               {"SLURM_JOB_NODELIST", "n[1-2]"},
               {"SLURM_JOB_ID", "42"}};
  CHECK(parse({"p"}, variables).nnodes == 1);

  variables = kSlurm;
  variables["SLURM_STEP_NUM_NODES"] = "1";
  variables["SLURM_STEP_NUM_TASKS"] = "1";
  const Options one = parse({"p"}, variables);
  CHECK(one.nnodes == 1);
  CHECK(one.node_rank == 0);
  CHECK(one.master_addr.empty());
  CHECK(one.master_port == 0);
}

TEST_CASE("with c10d SLURM says how many nodes there are, and the first serves the rendezvous") {
  const auto c10d = [](Words words, const Variables& variables = kSlurm) {
    words.insert(words.begin(), "--rdzv_backend=c10d");
    words.push_back("p");
    return parse(words, variables);
  };
  const Options all = c10d({});
  REQUIRE(all.elastic);
  CHECK(all.elastic->least == 3);
  CHECK(all.elastic->most == 3);
  CHECK(all.elastic->endpoint() == "n07:15044");
  CHECK(all.elastic->is_host == false);
  CHECK(all.run_id == "slurm-42.2");
  Variables first = kSlurm;
  first["SLURM_NODEID"] = "0";
  CHECK(c10d({}, first).elastic->is_host == true);
  CHECK(c10d({"--rdzv_conf=is_host=0"}, first).elastic->is_host == false);

  const Options range = c10d({"--nnodes=1:4"});
  CHECK(range.elastic->least == 1);
  CHECK(range.elastic->most == 4);
  CHECK(range.elastic->endpoint() == "n07:15044");
  // What is given wins, and a number that is not the step's has nothing to do with it.
  const Options given = c10d({"--rdzv_endpoint=h", "--rdzv_id=i"});
  CHECK(given.elastic->most == 3);
  CHECK(given.elastic->endpoint() == "h:29400");
  CHECK_FALSE(given.elastic->is_host);
  CHECK(given.run_id == "i");
  check_refused({"--rdzv_backend=c10d", "--nnodes=2", "p"}, {"--rdzv_endpoint"}, kSlurm);
  CHECK_FALSE(c10d({"--standalone"}).elastic);

  const Options mpi = c10d({}, {{"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                {"MASTER_ADDR", "m"}});
  CHECK(mpi.elastic->most == 2);
  CHECK(mpi.elastic->endpoint() == "m:29400");
  check_refused({"--rdzv_backend=c10d", "p"}, {"--rdzv_endpoint"},
                {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}});
}

TEST_CASE("the first host of a SLURM list") {
  CHECK(first_host("node[01-04,07]") == "node01");
  CHECK(first_host("node[7,09-11],other") == "node7");
  CHECK(first_host("a") == "a");
  CHECK(first_host("a,b[1-2]") == "a");
  CHECK(first_host("rack[2-3]n[04-05]") == "rack2n04");
  CHECK(first_host("n[1-2]-ib,m") == "n1-ib");
  CHECK(first_host("n[1") == "n1");
  CHECK(first_host("") == "");
}

TEST_CASE("Open MPI says what a launcher on each node needs, but for the address") {
  Variables variables = {{"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
  check_refused({"p"}, {"--nnodes=2", "--master_addr"}, variables);
  variables["MASTER_ADDR"] = "h";
  variables["MASTER_PORT"] = "77";
  const Options options = parse({"p"}, variables);
  CHECK(options.nnodes == 2);
  CHECK(options.node_rank == 1);
  CHECK(options.master_addr == "h");
  CHECK(options.master_port == 77);
  CHECK(parse({"--master_addr=x", "p"}, variables).master_addr == "x");
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  check_refused({"p"}, {"2 launchers", "ppr:1:node"}, variables);
}

TEST_CASE("what becomes of the output") {
  const Options plain = parse({"p"});
  CHECK_FALSE(plain.prefix_all);
  CHECK_FALSE(plain.tee.any());
  CHECK(plain.line_prefix == "[rank ${rank}]: ");
  const Options options = parse({"--nproc_per_node=12", "--log-dir=logs", "-r", "0:3,11:2", "--tee",
                                 "1", "--local-ranks-filter=0,11", "p"});
  CHECK(options.log_dir == "logs");
  CHECK(options.redirects.of(0) == 3);
  CHECK(options.redirects.of(1) == 0);
  CHECK(options.redirects.of(11) == 2);
  CHECK(options.tee.of(7) == 1);
  CHECK(*options.visible == std::set<int>{0, 11});
  CHECK(parse({"--line-prefix=role", "p"}).line_prefix == "[${role_name}${local_rank}]:");
  CHECK(parse({"--line-prefix=role", "p"}).prefix_all);
  CHECK(parse({"--line-prefix=<$rank>", "p"}).line_prefix == "<$rank>");
  CHECK_FALSE(parse({"--line-prefix=none", "p"}).prefix_all);
  CHECK(parse({"--line-prefix=none", "p"}).line_prefix.empty());
  const Options torchrun = parse({"p"}, {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "x"}});
  CHECK(torchrun.line_prefix == "x");
  CHECK_FALSE(torchrun.prefix_all);

  check_refused({"-r3", "p"}, {"--redirects", "--log_dir"});
  for (const std::string text : {"4", "-1", "0:4", "x", "0:1,", "0:", ":1", "0:1,2", ""}) {
    check_refused({"--tee=" + text, "p"}, {"--tee", "'" + text + "'"});
    check_refused({"--log_dir=x", "--redirects=" + text, "p"}, {"--redirects"});
  }
  check_refused({"--nproc_per_node=2", "--tee=2:1", "p"}, {"local rank 2", "0 to 1"});
  check_refused({"--nproc_per_node=2", "--local_ranks_filter=0,2", "p"}, {"local rank 2"});
  check_refused({"--local_ranks_filter=0;1", "p"}, {"--local_ranks_filter", "'0;1'"});
  check_refused({"--log_dir=", "p"}, {"--log_dir", "empty"});
}

TEST_CASE("how a job ends is read") {
  const Options options = parse({"--max-restarts=3", "--timeout=1.5", "p"});
  CHECK(options.max_restarts == 3);
  CHECK(options.timeout->count() == 1500);
  CHECK(options.ending_signals == std::set<int>{SIGTERM, SIGINT, SIGHUP, SIGQUIT});
  CHECK(parse({"--signals-to-handle=TERM,SIGUSR1", "p"}).ending_signals ==
        std::set<int>{SIGTERM, SIGUSR1});
  check_refused({"--max-restarts=-1", "p"}, {"--max_restarts", "'-1'"});
  check_refused({"--timeout=0", "p"}, {"--timeout"});
  check_refused({"--timeout=x", "p"}, {"--timeout", "'x'"});
  for (const std::string name : {"SIGTREM", "SIGKILL", "SIGSTOP", "SIGCHLD", "15", ""})
    check_refused({"--signals-to-handle=SIGTERM," + name, "p"},
                  {"--signals_to_handle", "'" + name + "'"});
}

TEST_CASE("what the program is") {
  CHECK(parse({"-m", "p"}).module);
  CHECK(parse({"--no-python", "p.py"}).no_python);
  CHECK(parse({"--run-path", "p"}).run_path);
  CHECK(parse({"--role=trainer", "p"}).role == "trainer");
  CHECK(parse({"--local-addr=h", "p"}).local_addr == "h");
  CHECK(parse({"--virtual-local-rank", "p"}).virtual_local_rank);
  CHECK(parse({"--tune-malloc", "p"}).tune_malloc);
  CHECK(parse({"p"}).numa_binding == NumaBinding::kNone);
  CHECK(parse({"--numa-binding=node", "p"}).numa_binding == NumaBinding::kNode);
  CHECK(parse({"--numa-binding=core-complex", "p"}).numa_binding == NumaBinding::kCoreComplex);
  CHECK(parse({"--dry-run", "p"}).dry_run);
  check_refused({"--numa-binding=core", "p"}, {"--numa_binding", "'core'", "'exclusive'"});
  check_refused({"--no-python", "-m", "p"}, {"--no_python", "--module"});
  check_refused({"--no-python", "--run-path", "p"}, {"--run_path"});
}

TEST_CASE("options without an effect are taken, and their values are checked") {
  for (const std::string method : {"spawn", "fork", "forkserver"}) {
    CHECK(
        parse({"--start-method", method, "--monitor-interval=0.1", "--event-log-handler=null", "p"})
            .nnodes == 1);
  }
  check_refused({"--start-method=thread", "p"}, {"--start_method", "'thread'"});
  check_refused({"--monitor-interval=x", "p"}, {"--monitor_interval", "'x'"});
  check_refused({"--logs-specs=x", "p"}, {"--logs-specs", "Python"});
  check_refused({"--duplicate-stdout-filters=x", "p"}, {"grep"});
}
