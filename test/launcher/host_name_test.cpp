// A machine whose own name has no address, and a master whose name has none. (Case C28.)

#include <sched.h>
#include <unistd.h>

#include <string>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;

namespace {

constexpr const char* kName = "bogus-host-xyz";

LaunchProcess::Setup on_nameless_machine() {
  LaunchProcess::Setup setup;
  setup.before_exec = [] {
    if (::unshare(CLONE_NEWUTS) != 0 || ::sethostname(kName, std::string(kName).size()) != 0)
      ::_exit(77);
  };
  return setup;
}

void check_works(std::vector<std::string> options) {
  options.insert(options.end(),
                 {"--nproc_per_node=2", "--use_env", worker_program(), "meet", "plain"});
  LaunchProcess job(options, on_nameless_machine());
  const int status = job.wait();
  if (status == 77) skip_test("needs the right to rename the machine (root)");
  INFO(job.errors());
  CHECK(status == 0);
}

}  // namespace

TEST_CASE("one node needs no name: by default") { check_works({}); }

TEST_CASE("one node needs no name: with an address") { check_works({"--master_addr=127.0.0.1"}); }

TEST_CASE("a master whose name has no address is named") {
  LaunchProcess job(with_script({"--nproc_per_node=2", std::string("--master_addr=") + kName},
                                "echo > $DIR/started"));
  CHECK(job.wait() == 1);
  CHECK_THAT(job.errors(), ContainsSubstring(kName));
  CHECK_FALSE(job.has("started"));
}
