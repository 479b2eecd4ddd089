// What becomes of what the workers write. (Case C25.)

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <launcher/unique_fd.h>

#include "catch2.h"
#include "launch_process.h"

using namespace ddp::launcher::test;
using ddp::launcher::UniqueFd;

namespace {

const std::string kTwo = "--nproc_per_node=2";

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

using Lines = std::vector<std::string>;

/// A launcher whose standard output is a pipe.
struct PipedScreen {
  UniqueFd out;
  UniqueFd in;
  LaunchProcess::Setup setup;

  PipedScreen() {
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    out = UniqueFd(ends[0]);
    in = UniqueFd(ends[1]);
    setup.before_exec = [fd = ends[1]] { ::dup2(fd, STDOUT_FILENO); };
  }

  /// All that comes until nobody can write any more.
  std::string read_all() {
    in.reset();
    std::string all;
    std::vector<char> part(1 << 16);
    for (ssize_t size = 0; (size = ::read(out.get(), part.data(), part.size())) > 0;)
      all.append(part.data(), static_cast<size_t>(size));
    return all;
  }
};

/// Writes much, and says so in a file only when all of it was taken.
const std::string kMuch =
    "echo $$ > $DIR/pid.$RANK\n"
    "yes 0123456789012345678901234567890123456789 | head -n 400000\n"
    "echo > $DIR/written.$RANK";

[[maybe_unused]] long peak_kilobytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::atol(line.c_str() + 6);
  }
  return -1;
}

void await_stuck(const LaunchProcess& job) {
  const pid_t guardian = job.guardian();
  // Nothing is read any more: the same bytes were read at two looks while the guardian sleeps.
  const auto bytes_read = [&] {
    std::ifstream io("/proc/" + std::to_string(guardian) + "/io");
    long rchar = 0;
    std::string name;
    io >> name >> rchar;
    return rchar;
  };
  long before = -1;
  await("the launcher reads no more", [&] {
    const long now = bytes_read();
    const bool same = now == before && now > (1 << 16) && process_state(guardian) == 'S';
    before = now;
    ::usleep(20000);
    return same;
  });
}

}  // namespace

TEST_CASE("without options the workers have the launcher's own output") {
  LaunchProcess job(with_script({kTwo}, "readlink /proc/self/fd/1 /proc/self/fd/2"));
  CHECK(job.wait() == 0);
  const std::string out = job.folder() + "/stdout";
  const std::string err = job.folder() + "/stderr";
  CHECK(sorted_lines(job.output()) == Lines{err, err, out, out});
}

TEST_CASE("tee: lines with a prefix on the screen, bytes in the files") {
  const LaunchProcess job(with_script({}, "exit 0"));
  LaunchProcess tee(with_script({kTwo, "--tee=3", "--rdzv-id=run", "--log-dir", job.folder()},
                                "echo out $RANK; echo error $RANK >&2; printf end"));
  CHECK(tee.wait() == 0);
  CHECK(sorted_lines(tee.output()) ==
        Lines{"[rank 0]: end", "[rank 0]: out 0", "[rank 1]: end", "[rank 1]: out 1"});
  CHECK(sorted_lines(tee.errors()) == Lines{"[rank 0]: error 0", "[rank 1]: error 1"});
  CHECK(job.read("run/attempt_0/0/stdout.log") == "out 0\nend");
  CHECK(job.read("run/attempt_0/1/stdout.log") == "out 1\nend");
  CHECK(job.read("run/attempt_0/1/stderr.log") == "error 1\n");
}

TEST_CASE("redirects and tee by local rank, and what is shown") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  LaunchProcess job(
      with_script({"--nproc_per_node=4", "--redirects=0:3,1:2", "--tee=2:1,3:1",
                   "--local-ranks-filter=0,1,2", "--rdzv-id=run", "--log-dir", logs.folder()},
                  "echo out $RANK; echo error $RANK >&2"));
  CHECK(job.wait() == 0);
  CHECK(sorted_lines(job.output()) == Lines{"[rank 2]: out 2", "out 1"});
  CHECK(sorted_lines(job.errors()) == Lines{"error 2"});
  const std::map<std::string, std::string> files = {{"0/stdout.log", "out 0\n"},
                                                    {"0/stderr.log", "error 0\n"},
                                                    {"1/stderr.log", "error 1\n"},
                                                    {"2/stdout.log", "out 2\n"},
                                                    {"3/stdout.log", "out 3\n"}};
  for (const auto& [file, text] : files) CHECK(logs.read("run/attempt_0/" + file) == text);
  for (const std::string file : {"1/stdout.log", "2/stderr.log", "3/stderr.log", "0/error.json"})
    CHECK_FALSE(logs.has("run/attempt_0/" + file));
}

TEST_CASE("redirects of everything leave nothing on the screen") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  LaunchProcess job(
      with_script({kTwo, "--redirects=3", "--rdzv-id=run", "--log-dir", logs.folder() + "/not/yet"},
                  "echo out $RANK; echo error $RANK >&2"));
  CHECK(job.wait() == 0);
  CHECK(job.output() == "");
  CHECK(job.errors() == "");
  for (const std::string rank : {"0", "1"}) {
    const std::string folder = "not/yet/run/attempt_0/" + rank;
    CHECK(logs.read(folder + "/stdout.log") == "out " + rank + "\n");
    CHECK(logs.read(folder + "/stderr.log") == "error " + rank + "\n");
  }
}

TEST_CASE("one rank on the screen, the files of all are whole") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  const std::string script = "echo out $RANK; echo error $RANK >&2";
  LaunchProcess tee(with_script(
      {kTwo, "--tee=3", "--local-ranks-filter=0", "--rdzv-id=run", "--log-dir", logs.folder()},
      script));
  CHECK(tee.wait() == 0);
  CHECK(tee.output() == "[rank 0]: out 0\n");
  CHECK(tee.errors() == "[rank 0]: error 0\n");
  CHECK(logs.read("run/attempt_0/1/stdout.log") == "out 1\n");
  CHECK(logs.read("run/attempt_0/1/stderr.log") == "error 1\n");
  LaunchProcess alone(with_script({kTwo, "--local-ranks-filter=0"}, script));
  CHECK(alone.wait() == 0);
  CHECK(alone.output() == "out 0\n");
  CHECK(alone.errors() == "error 0\n");
}

TEST_CASE("runs with the same folder and id neither mix their files nor lose any") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  const auto run = [&](const std::string& script) {
    return with_script({"--redirects=1", "--rdzv-id=run", "--log-dir", logs.folder()}, script);
  };
  LaunchProcess slow(
      run("echo slow begins; echo > $DIR/begun\n"
          "until [ -e $DIR/go ]; do sleep 0.01; done; echo slow ends"));
  slow.await_files({"begun"});
  LaunchProcess quick(run("echo quick; echo mistake > $TORCHELASTIC_ERROR_FILE"));
  CHECK(quick.wait() == 0);
  slow.write("go");
  CHECK(slow.wait() == 0);
  LaunchProcess last(run("echo last"));
  CHECK(last.wait() == 0);
  CHECK(logs.read("run/attempt_0/0/stdout.log.1") == "slow begins\nslow ends\n");
  CHECK(logs.read("run/attempt_0/0/stdout.log.2") == "quick\n");
  CHECK(logs.read("run/attempt_0/0/stdout.log") == "last\n");
  CHECK(logs.read("run/attempt_0/0/error.json.1") == "mistake\n");
  CHECK_FALSE(logs.has("run/attempt_0/0/error.json"));
}

TEST_CASE("line prefixes without tee, and their forms") {
  const std::pair<Lines, Lines> cases[] = {
      {{"--line-prefix=rank"}, {"[rank 0]: x", "[rank 1]: x"}},
      {{"--line-prefix=role"}, {"[default0]:x", "[default1]:x"}},
      {{"--line-prefix=role", "--role=trainer"}, {"[trainer0]:x", "[trainer1]:x"}},
      {{"--line-prefix=${rank}/$local_rank "}, {"0/0 x", "1/1 x"}},
      {{"--tee=1", "--line-prefix=none"}, {"x", "x"}},
  };
  for (const auto& [options, lines] : cases) {
    Lines all = {kTwo};
    all.insert(all.end(), options.begin(), options.end());
    LaunchProcess job(with_script(all, "echo x"));
    CHECK(job.wait() == 0);
    CHECK(sorted_lines(job.output()) == lines);
  }
  LaunchProcess::Setup setup;
  setup.environment = {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name}>"}};
  LaunchProcess job(with_script({"--tee=1"}, "echo x"), setup);
  CHECK(job.wait() == 0);
  CHECK(job.output() == "<default>x\n");
}

TEST_CASE("a progress bar goes over itself, and other lines below it") {
  LaunchProcess job(with_script({"--line-prefix=rank"},
                                "printf '\\r1%%'; printf '\\r2%%\\n'; printf '3%%\\r' >&1\n"
                                "printf 'done\\n'; printf '4%%\\r'"));
  CHECK(job.wait() == 0);
  CHECK(job.output() ==
        "[rank 0]: 1%\r[rank 0]: 2%\n[rank 0]: 3%\r[rank 0]: done\n[rank 0]: 4%\r\n");
}

TEST_CASE("a bar of another worker is not written over") {
  LaunchProcess job(with_script({kTwo, "--line-prefix=rank"},
                                "if [ $RANK = 0 ]; then\n"
                                "  printf '1%%\\r'; echo > $DIR/bar\n"
                                "  until [ -e $DIR/line ]; do sleep 0.01; done\n"
                                "  exit 0\n"
                                "fi\n"
                                "until grep -q 1% $DIR/stdout; do sleep 0.01; done\n"
                                "echo line; until grep -q line $DIR/stdout; do sleep 0.01; done\n"
                                "echo > $DIR/line"));
  CHECK(job.wait() == 0);
  CHECK(job.output() == "[rank 0]: 1%\r\n[rank 1]: line\n");
}

TEST_CASE("files have the bytes as they are") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  LaunchProcess job(
      with_script({"--tee=1", "--rdzv-id=run", "--log-dir", logs.folder()},
                  "head -c 3000000 /dev/urandom > $DIR/bytes; cat $DIR/bytes; cat $DIR/bytes >&2"));
  CHECK(job.wait() == 0);
  CHECK(logs.read("run/attempt_0/0/stdout.log") == job.read("bytes"));
  CHECK(job.errors() == job.read("bytes"));
}

TEST_CASE("lines of many workers stay whole") {
  LaunchProcess job(
      with_script({"--nproc_per_node=6", "--tee=3"},
                  "i=0; while [ $i -lt 300 ]; do echo $i $RANK aaaaaaaaaaaaaaaaaaaaaaaaa;\n"
                  "echo $i $RANK aaaaaaaaaaaaaaaaaaaaaaaaa >&2; i=$((i + 1)); done"));
  CHECK(job.wait() == 0);
  for (const std::string& text : {job.output(), job.errors()}) {
    Lines expected;
    for (int rank = 0; rank < 6; ++rank) {
      for (int i = 0; i < 300; ++i) {
        expected.push_back("[rank " + std::to_string(rank) + "]: " + std::to_string(i) + " " +
                           std::to_string(rank) + " aaaaaaaaaaaaaaaaaaaaaaaaa");
      }
    }
    std::sort(expected.begin(), expected.end());
    CHECK(sorted_lines(text) == expected);
  }
}

TEST_CASE("what a worker wrote before it died is shown") {
  LaunchProcess job(with_script({kTwo, "--tee=3"},
                                "if [ $RANK = 1 ]; then\n"
                                "  until grep -q waits $DIR/stdout; do sleep 0.01; done\n"
                                "  head -c 60000 /dev/zero | tr '\\0' x; kill -KILL $$\n"
                                "fi\n"
                                "echo waits; exec sleep 300"));
  CHECK(job.wait() == 137);
  CHECK_THAT(job.output(), ContainsSubstring("[rank 1]: " + std::string(60000, 'x') + "\n"));
  CHECK_THAT(job.errors(), ContainsSubstring("killed by SIGKILL"));
}

TEST_CASE("a slow screen makes the workers wait, not the launcher grow, and nothing is lost") {
  PipedScreen screen;
  LaunchProcess job(with_script({kTwo, "--tee=1"}, kMuch), screen.setup);
  await_stuck(job);
#ifndef __SANITIZE_ADDRESS__  // that takes much more itself
  CHECK(peak_kilobytes(job.guardian()) < 32 * 1024);
#endif
  CHECK_FALSE(job.has("written.0"));
  std::map<std::string, int> lines;
  std::istringstream all(screen.read_all());
  for (std::string line; std::getline(all, line);) ++lines[line];
  CHECK(job.wait() == 0);
  const std::string text = "0123456789012345678901234567890123456789";
  CHECK(lines ==
        std::map<std::string, int>{{"[rank 0]: " + text, 400000}, {"[rank 1]: " + text, 400000}});
}

TEST_CASE("a screen that takes nothing does not keep the job from being stopped") {
  for (const bool killed : {false, true}) {
    PipedScreen screen;
    LaunchProcess job(with_script({kTwo, "--tee=1", "--grace_period=0.3"}, kMuch), screen.setup);
    await_stuck(job);
    REQUIRE(::kill(job.pid(), killed ? SIGKILL : SIGTERM) == 0);
    CHECK(job.wait() == (killed ? 137 : 143));
    CHECK(job.none_left());
  }
}

TEST_CASE("when the screen's reader goes the job goes on, and the files are whole") {
  const LaunchProcess logs(with_script({}, "exit 0"));
  PipedScreen screen;
  LaunchProcess job(with_script({"--tee=1", "--rdzv-id=run", "--log-dir", logs.folder()}, kMuch),
                    screen.setup);
  await_stuck(job);
  screen.in.reset();
  screen.out.reset();
  CHECK(job.wait() == 0);
  CHECK(job.has("written.0"));
  CHECK(logs.read("run/attempt_0/0/stdout.log").size() == 41u * 400000);
}

TEST_CASE("one screen for both streams keeps their lines whole") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] { ::dup2(STDOUT_FILENO, STDERR_FILENO); };
  LaunchProcess job(with_script({"--tee=3"},
                                "i=0; while [ $i -lt 200 ]; do echo out; echo err >&2\n"
                                "i=$((i + 1)); done; exit 3"),
                    setup);
  CHECK(job.wait() == 3);
  const std::string all = job.output();
  std::map<std::string, int> lines;
  std::istringstream stream(all);
  for (std::string line; std::getline(stream, line);) ++lines[line];
  CHECK(lines["[rank 0]: out"] == 200);
  CHECK(lines["[rank 0]: err"] == 200);
  CHECK(lines["launch: exit status: 3"] == 1);
}

TEST_CASE("too many streams for the limit on open files is an error that says how many") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] {
    const rlimit few{64, 64};
    ::setrlimit(RLIMIT_NOFILE, &few);
  };
  LaunchProcess job(with_script({"--nproc_per_node=64", "--tee=3"}, "echo > $DIR/started"), setup);
  CHECK(job.wait() == 1);
  CHECK_THAT(job.errors(), ContainsSubstring("ulimit -n"));
  CHECK_FALSE(job.has("started"));
  LaunchProcess filtered(
      with_script({"--nproc_per_node=64", "--tee=3", "--local-ranks-filter=5"}, "echo $RANK"),
      setup);
  CHECK(filtered.wait() == 0);
  CHECK(filtered.output() == "[rank 5]: 5\n");
}

TEST_CASE("512 workers within 1024 open files") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] {
    const rlimit usual{1024, 1024};
    ::setrlimit(RLIMIT_NOFILE, &usual);
  };
  LaunchProcess job(
      with_script({"--nproc_per_node=512", "--tee=1:1"},
                  "[ \"$(ulimit -n)\" = 1024 ] && [ -n \"$TORCHELASTIC_ERROR_FILE\" ] "
                  "|| exit 1; [ $RANK = 1 ] && echo $WORLD_SIZE; exit 0"),
      setup);
  const int status = job.wait();
  INFO(job.errors());
  CHECK(status == 0);
  CHECK(job.output() == "[rank 1]: 512\n");
}

TEST_CASE("the launcher raises its own limit on open files, not that of the workers") {
  LaunchProcess::Setup setup;
  setup.before_exec = [] {
    const rlimit low{64, 1024};
    ::setrlimit(RLIMIT_NOFILE, &low);
  };
  LaunchProcess job(with_script({"--nproc_per_node=64", "--tee=3"}, "ulimit -n"), setup);
  CHECK(job.wait() == 0);
  for (const std::string& line : sorted_lines(job.output()))
    CHECK(line.substr(line.size() - 4) == ": 64");
}

TEST_CASE("a folder that cannot be made is named") {
  LaunchProcess job(with_script({"--log-dir=/dev/null/x"}, "echo > $DIR/started"));
  CHECK(job.wait() == 1);
  CHECK_THAT(job.errors(), ContainsSubstring("/dev/null"));
  CHECK_FALSE(job.has("started"));
}
