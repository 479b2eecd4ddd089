// What the launcher costs: `launch --nproc_per_node=N EMPTY` against a plain fork and exec of as
// many such programs, in turn in one run, and against torchrun; and the memory that it takes.
//
//   bench_launch [--workers N,N,...] [--rounds N] [--torchrun PROGRAM] [--json FILE]
//
// By default 2, 64 and 512 workers; 101 rounds of the first and fewer of the larger; without
// torchrun. Prints a table of medians in milliseconds. scripts/bench_launcher.sh knows where
// torchrun is.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

constexpr const char* kLaunch = DDP_LAUNCH_FOLDER "/launch";
constexpr int kTorchrunRounds = 5;

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "bench_launch: %s\n", text.c_str());
  std::exit(1);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<char*> pointers(const Words& words) {
  std::vector<char*> result;
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

pid_t start(const std::vector<char*>& arguments) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  if (pid < 0) die(std::string("cannot fork: ") + std::strerror(errno));
  return pid;
}

/// Starts `count` processes of it and waits for them all: the milliseconds.
double run(int count, const Words& words) {
  const std::vector<char*> arguments = pointers(words);
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) start(arguments);
  int status = 0;
  while (::wait(&status) > 0) {
    if (status != 0) die(words[0] + " failed");
  }
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The most that this process has had in memory, in MB.
double peak_megabytes(const std::string& pid) {
  const std::string status = read("/proc/" + pid + "/status");
  const auto at = status.find("VmHWM:");
  return at == std::string::npos ? 0 : std::atof(status.c_str() + at + 6) / 1024;
}

/// Of the launcher's two processes together, while two workers run.
double launcher_megabytes() {
  // The worker is told to end by the end of its input, which it gets from here.
  int ends[2];
  if (::pipe(ends) != 0) die("cannot make a pipe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[0], STDIN_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    ::execl(kLaunch, kLaunch, "--nproc_per_node=2", "--use_env", "/bin/cat", nullptr);
    ::_exit(127);
  }
  ::close(ends[0]);
  const std::string front = std::to_string(pid);
  const auto children = [](const std::string& of) {
    return read("/proc/" + of + "/task/" + of + "/children");
  };
  std::string guardian;
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (guardian.empty() || children(guardian).empty()) {
    if (Clock::now() > deadline) die("the launcher starts no worker");
    const std::string child = children(front);
    guardian = child.substr(0, child.find(' '));
  }
  const double sum = peak_megabytes(front) + peak_megabytes(guardian);
  ::close(ends[1]);
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid || status != 0) die("the launcher failed");
  return sum;
}

struct Row {
  int workers;
  int rounds;
  double plain;
  double launch;
  double torchrun;  ///< 0: not measured
};

Row compare(int workers, int rounds, const std::string& torchrun) {
  const std::string option = "--nproc_per_node=" + std::to_string(workers);
  std::vector<double> plain, launched, theirs;
  for (int round = 0; round < rounds; ++round) {
    plain.push_back(run(workers, {DDP_EMPTY_PROGRAM}));
    launched.push_back(run(1, {kLaunch, option, DDP_EMPTY_PROGRAM}));
    // In turn with the others, but it takes seconds: some times are enough.
    if (!torchrun.empty() && round % std::max(1, rounds / kTorchrunRounds) == 0)
      theirs.push_back(run(1, {torchrun, "--no-python", option, "/bin/true"}));
  }
  return {workers, rounds, median(plain), median(launched), theirs.empty() ? 0 : median(theirs)};
}

void print(const std::vector<Row>& rows, double megabytes) {
  std::printf("%8s %7s %12s %12s %9s %12s %10s\n", "workers", "rounds", "fork+exec ms", "launch ms",
              "ratio", "torchrun ms", "faster");
  for (const Row& row : rows) {
    std::printf("%8d %7d %12.3f %12.3f %9.2f", row.workers, row.rounds, row.plain, row.launch,
                row.launch / row.plain);
    if (row.torchrun > 0) {
      std::printf(" %12.1f %9.0fx\n", row.torchrun, row.torchrun / row.launch);
    } else {
      std::printf(" %12s %10s\n", "-", "-");
    }
  }
  std::printf("both processes of the launcher, at most: %.1f MB\n", megabytes);
}

void write_json(const std::string& path, const std::vector<Row>& rows, double megabytes) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) die("cannot write " + path);
  std::fprintf(file, "{\"launcher_peak_mb\": %.2f, \"medians_ms\": [", megabytes);
  for (const Row& row : rows) {
    std::fprintf(file, "%s\n  {\"workers\": %d, \"rounds\": %d, \"plain\": %.4f, \"launch\": %.4f",
                 &row == rows.data() ? "" : ",", row.workers, row.rounds, row.plain, row.launch);
    if (row.torchrun > 0) std::fprintf(file, ", \"torchrun\": %.2f", row.torchrun);
    std::fprintf(file, "}");
  }
  std::fprintf(file, "\n]}\n");
  if (std::fclose(file) != 0) die("cannot write " + path);
}

}  // namespace

int main(int argc, char** argv) {
  std::string workers = "2,64,512";
  std::string torchrun;
  std::string json;
  int rounds = 101;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = argv[i + 1];
    if (option == "--workers") {
      workers = value;
    } else if (option == "--rounds") {
      rounds = std::atoi(value.c_str());
    } else if (option == "--torchrun") {
      torchrun = value;
    } else if (option == "--json") {
      json = value;
    } else {
      die("unknown option " + option);
    }
  }
  if (argc % 2 == 0 || rounds < 1)
    die("give --workers N,N,... --rounds N --torchrun PROGRAM --json FILE");

  ::setenv("OMP_NUM_THREADS", "1", /*replace=*/0);  // torchrun warns otherwise
  std::vector<Row> rows;
  for (size_t begin = 0; begin < workers.size();) {
    const auto end = std::min(workers.find(',', begin), workers.size());
    const int count = std::atoi(workers.substr(begin, end - begin).c_str());
    if (count < 1) die("--workers must be numbers from 1, not " + workers);
    // Against torchrun with the first alone: hundreds of its workers take minutes.
    const int fewer = count > 256 ? 10 : count > 16 ? 4 : 1;
    rows.push_back(compare(count, std::max(1, rounds / fewer), rows.empty() ? torchrun : ""));
    begin = end + 1;
  }
  const double megabytes = launcher_megabytes();
  print(rows, megabytes);
  if (!json.empty()) write_json(json, rows, megabytes);
  return 0;
}
