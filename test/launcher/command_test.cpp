// What is executed: programs, Python's scripts and modules; and what --dry-run shows of it.

#include <string>
#include <vector>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

/// An interpreter that shows its arguments instead of Python.
LaunchProcess::Setup with_interpreter() {
  LaunchProcess::Setup setup;
  setup.environment = {{"PYTHON_EXEC", worker_program()}};
  return setup;
}

std::string shown(std::vector<std::string> words) {
  LaunchProcess job(words, with_interpreter());
  const int status = job.wait();
  INFO(job.errors());
  CHECK(status == 0);
  return job.output();
}

}  // namespace

TEST_CASE("scripts and modules run under Python, with the rank as it spells it") {
  const LaunchProcess folder(with_script({}, "exit 0"));
  folder.write("s.py", "");
  folder.write("s.txt", "");
  const std::string script = folder.folder() + "/s.py";
  const std::string other = folder.folder() + "/s.txt";
  CHECK(shown({script, "a", "-m"}) == "0: <-u> <" + script + "> <--local-rank=0> <a> <-m>\n");
  CHECK(shown({"--use-env", script, "a"}) == "0: <-u> <" + script + "> <a>\n");
  CHECK(shown({"--run-path", "--use-env", other}) == "0: <-u> <" + other + ">\n");
  CHECK(shown({"-m", "--use-env", "pack.age", "a"}) == "0: <-u> <-m> <pack.age> <a>\n");
  CHECK(shown({"--module", "pack.age", "a"}) == "0: <-u> <-m> <pack.age> <--local-rank=0> <a>\n");
}

TEST_CASE("a real Python runs a script and a module") {
  const LaunchProcess folder(with_script({}, "exit 0"));
  folder.write("script.py", "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n");
  LaunchProcess script({"--use-env", folder.folder() + "/script.py", "x"});
  const int status = script.wait();
  if (status == 127) skip_test("needs python3");
  CHECK(status == 0);
  CHECK(script.output() == "0 ['x']\n");
  LaunchProcess::Setup setup;
  setup.environment = {{"PYTHONPATH", folder.folder()}};
  LaunchProcess module({"-m", "script", "x"}, setup);
  CHECK(module.wait() == 0);
  CHECK(module.output() == "0 ['--local-rank=0', 'x']\n");
}

TEST_CASE("without Python a program may have any name") {
  LaunchProcess folder(
      with_script({}, "printf '#!/bin/sh\\necho \"$@\"' > $DIR/p.py; chmod +x $DIR/p.py"));
  REQUIRE(folder.wait() == 0);
  CHECK(shown({"--no-python", "--use-env", folder.folder() + "/p.py", "a"}) == "a\n");
}

TEST_CASE("a script that is not there is named, and so is a missing Python") {
  LaunchProcess script({"/nonexistent/s.py"});
  CHECK(script.wait() == 127);
  CHECK_THAT(script.errors(), ContainsSubstring("/nonexistent/s.py"));
  LaunchProcess folder({"--run-path", "/tmp"});
  CHECK(folder.wait() == 126);
  LaunchProcess::Setup setup;
  setup.environment = {{"PYTHON_EXEC", "/nonexistent/python"}};
  LaunchProcess python({"-m", "x"}, setup);
  CHECK(python.wait() == 127);
  CHECK_THAT(python.errors(), ContainsSubstring("/nonexistent/python"));
}

TEST_CASE("a dry run shows what would start, in a form that a shell runs, and starts nothing") {
  LaunchProcess dry({"--dry-run", "--nproc_per_node=2", "--master_addr=127.0.0.2", "--role=r w",
                     worker_program(), "it's", "", "$HOME"});
  CHECK(dry.wait() == 0);
  CHECK_THAT(dry.output(), ContainsSubstring("RANK=1 \\\n"));
  CHECK_THAT(dry.output(), ContainsSubstring("WORLD_SIZE=2 \\\n"));
  CHECK_THAT(dry.output(), ContainsSubstring("MASTER_ADDR=127.0.0.2 \\\n"));
  CHECK_THAT(dry.output(), ContainsSubstring("ROLE_NAME='r w' \\\n"));
  CHECK(dry.errors() == "");
  // Without the line that names a socket of the launcher's.
  LaunchProcess shell(with_script({}, "exit 0"));
  shell.write("script", dry.output());
  LaunchProcess run({"--use-env", "/bin/sh", shell.folder() + "/script"});
  CHECK(run.wait() == 0);
  CHECK(run.output() ==
        "0: <--local_rank=0> <it's> <> <$HOME>\n"
        "1: <--local_rank=1> <it's> <> <$HOME>\n");
}

TEST_CASE("the options that have no effect leave a job as it is") {
  LaunchProcess job(with_script(
      {"--nproc-per-node=2", "--monitor-interval=5", "--start-method=fork",
       "--event-log-handler=console", "--standalone", "--rdzv-id=x", "--rdzv-conf=timeout=3"},
      "echo $WORLD_SIZE $MASTER_ADDR $GROUP_WORLD_SIZE > $DIR/saw.$RANK"));
  CHECK(job.wait() == 0);
  CHECK(job.read("saw.0") == "2 127.0.0.1 1\n");
  CHECK(job.read("saw.1") == "2 127.0.0.1 1\n");
}

TEST_CASE("the environment stands behind the command line") {
  LaunchProcess::Setup setup;
  setup.environment = {{"PET_NPROC_PER_NODE", "2"}, {"PET_TEE", "1"}, {"PET_RDZV_ID", "mine"}};
  LaunchProcess job(with_script({}, "[ $RANK = 1 ] && echo $TORCHELASTIC_RUN_ID; exit 0"), setup);
  CHECK(job.wait() == 0);
  CHECK(job.output() == "[rank 1]: mine\n");
}
