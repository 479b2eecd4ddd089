// The command line: splitting, checking, help.

#include <string>
#include <vector>

#include <launcher/cores.h>
#include <launcher/error.h>
#include <launcher/help.h>
#include <launcher/option_table.h>
#include <launcher/options.h>
#include <launcher/split_arguments.h>

#include "catch2.h"
#include "parse.h"

using namespace ddp::launcher;
using namespace ddp::launcher::test;

TEST_CASE("arguments are split at the program's name") {
  struct Case {
    Words given;
    size_t options;
    Words command;
  };
  const Case cases[] = {
      {{"p"}, 0, {"p"}},
      {{"--use_env", "p", "--use_env"}, 1, {"p", "--use_env"}},
      {{"--nnodes=2", "p", "--nnodes", "3", ""}, 1, {"p", "--nnodes", "3", ""}},
      {{"--nnodes", "2", "p"}, 1, {"p"}},
      {{"--node-rank", "-1", "p"}, 1, {"p"}},
      {{"--master-addr", "", "p"}, 1, {"p"}},
      {{"--", "p"}, 0, {"p"}},
      {{"--", "--p", "x"}, 0, {"--p", "x"}},
      {{"--", "--", "x"}, 0, {"--", "x"}},
      {{"p", "--"}, 0, {"p", "--"}},
      {{"p", "--", "x"}, 0, {"p", "--", "x"}},
      {{"", "x"}, 0, {"", "x"}},
      {{"-h"}, 1, {}},
      {{"-r", "3", "p"}, 1, {"p"}},
      {{"-r3", "-t=1", "-m", "p", "-r", "1"}, 3, {"p", "-r", "1"}},
      {{}, 0, {}},
  };
  for (const Case& each : cases) {
    const SplitArguments split = split_arguments(pointers(each.given));
    CHECK(split.options.size() == each.options);
    CHECK(split.command == each.command);
  }
}

TEST_CASE("both spellings and both forms mean the same") {
  const Words spellings[] = {
      {"--nproc_per_node=3", "p"},    {"--nproc-per-node=3", "p"},
      {"--nproc_per-node", "3", "p"}, {"--nproc-per_node=3", "p"},
      {"--nproc_per_node", "3", "p"}, {"--nproc_per_node=1", "--nproc-per-node=3", "p"},
  };
  for (const Words& words : spellings) CHECK(parse(words).nproc_per_node == 3);
}

TEST_CASE("what is given arrives") {
  const Options options =
      parse({"--nnodes=4", "--node_rank=2", "--nproc_per_node=8", "--master_addr=10.0.0.1",
             "--master_port=1234", "--use_env", "--grace_period=1.5", "p", "x"});
  CHECK(options.nnodes == 4);
  CHECK(options.node_rank == 2);
  CHECK(options.nproc_per_node == 8);
  CHECK(options.master_addr == "10.0.0.1");
  CHECK(options.master_port == 1234);
  CHECK(options.use_env);
  CHECK(options.grace_period.count() == 1500);
  CHECK(options.command == Words{"p", "x"});
  CHECK(options.placement().world_size == 32);
  CHECK(options.placement().rank(3) == 19);
}

TEST_CASE("the defaults are those of torchrun") {
  const Options options = parse({"p"});
  CHECK(options.nnodes == 1);
  CHECK(options.node_rank == 0);
  CHECK(options.nproc_per_node == 1);
  CHECK(options.master_addr == "");
  CHECK(options.master_port == 0);
  CHECK_FALSE(options.use_env);
  CHECK(options.grace_period.count() == 30000);
  CHECK(parse({"p"}, "ddprun").use_env);
  CHECK(parse({"p"}, "/opt/bin/ddprun").use_env);
  CHECK_FALSE(parse({"p"}, "/opt/ddprun/launch").use_env);
}

TEST_CASE("cpu is a process for each core") {
  CHECK(available_cores() >= 1);
  CHECK(parse({"--nproc-per-node", "cpu", "p"}).nproc_per_node == available_cores());
}

TEST_CASE("what is wrong is named, with the remedy") {
  struct Case {
    Words given;
    Words said;
  };
  const Case cases[] = {
      {{}, {"no program", "Usage"}},
      {{"--"}, {"no program"}},
      {{"--nproc_per_node=2"}, {"no program"}},
      {{"--nproc", "2", "p"}, {"--nproc", "did you mean --nproc_per_node?"}},
      {{"--nproces_per_node=2", "p"}, {"--nproces_per_node", "did you mean --nproc_per_node?"}},
      {{"-nproc_per_node=2", "p"}, {"-nproc_per_node", "did you mean --nproc_per_node?"}},
      {{"--master-prot=1", "p"}, {"--master-prot", "did you mean --master_port?"}},
      {{"--qqqqqqqqqq", "p"}, {"unknown option --qqqqqqqqqq"}},
      {{"-x", "p"}, {"unknown option -x"}},
      {{"-mx", "p"}, {"unknown option -mx"}},
      {{"-r"}, {"-r needs a value"}},
      {{"-t", "-m", "p"}, {"-t needs a value"}},
      {{"-", "p"}, {"unknown option -"}},
      {{"--=3", "p"}, {"unknown option --"}},
      {{"--nproc_per_node=0", "p"}, {"--nproc_per_node", "'0'", "auto"}},
      {{"--nproc_per_node=-1", "p"}, {"--nproc_per_node", "'-1'"}},
      {{"--nproc_per_node=two", "p"}, {"--nproc_per_node", "'two'"}},
      {{"--nproc_per_node=2x", "p"}, {"--nproc_per_node", "'2x'"}},
      {{"--nproc_per_node= 2", "p"}, {"--nproc_per_node", "' 2'"}},
      {{"--nproc_per_node=", "p"}, {"--nproc_per_node", "''"}},
      {{"--nproc_per_node=99999999999999999999", "p"}, {"--nproc_per_node"}},
      {{"--nproc_per_node"}, {"--nproc_per_node needs a value"}},
      {{"--nproc-per-node", "--use_env", "p"}, {"--nproc-per-node needs a value"}},
      {{"--nproc-per-node", "--", "p"}, {"--nproc-per-node needs a value"}},
      {{"--nnodes=0", "p"}, {"--nnodes", "'0'"}},
      {{"--nnodes=2", "p"}, {"--nnodes=2", "--master_addr"}},
      {{"--nnodes=2", "--node_rank=2", "--master_addr=x", "p"}, {"--node_rank=2", "from 0 to 1"}},
      {{"--node_rank=1", "p"}, {"--node_rank=1", "--nnodes=1"}},
      {{"--node_rank=-1", "p"}, {"--node_rank", "'-1'"}},
      {{"--master_port=65536", "p"}, {"--master_port", "65535", "'65536'"}},
      {{"--master_port=0", "p"}, {"--master_port", "'0'"}},
      {{"--master_addr=", "p"}, {"--master_addr", "empty"}},
      {{"--use_env=1", "p"}, {"--use_env", "no value"}},
      {{"--grace_period=-1", "p"}, {"--grace_period", "'-1'"}},
      {{"--grace_period=nan", "p"}, {"--grace_period", "'nan'"}},
      {{"--grace_period=1.2.3", "p"}, {"--grace_period", "'1.2.3'"}},
      {{"--grace_period=.", "p"}, {"--grace_period", "'.'"}},
      {{"--grace_period=soon", "p"}, {"--grace_period", "'soon'"}},
      {{"--nnodes=1000000", "--nproc_per_node=60000", "--master_addr=x", "p"}, {"more processes"}},
  };
  for (const Case& each : cases) {
    const Error error = refused(each.given);
    CHECK(error.status() == 2);
    for (const std::string& text : each.said) CHECK_THAT(error.what(), ContainsSubstring(text));
  }
}

TEST_CASE("help and version are asked for without a program") {
  CHECK(parse({"--help"}).help);
  CHECK(parse({"-h"}).help);
  CHECK(parse({"--nproc_per_node=x", "--help"}).help);
  CHECK(parse({"--version"}).version);
  CHECK_FALSE(parse({"p", "--help"}).help);
}

TEST_CASE("help shows every option and examples for one node and several") {
  const std::string text = help_text();
  for (const OptionSpec& option : option_table()) {
    CHECK_THAT(text, ContainsSubstring("--" + std::string(option.name)));
    CHECK_THAT(text, ContainsSubstring(std::string(option.group) + ":\n"));
  }
  CHECK_THAT(text, ContainsSubstring("launch --nproc_per_node=4 ./train"));
  CHECK_THAT(text, ContainsSubstring("--node_rank=1 --master_addr="));
}
