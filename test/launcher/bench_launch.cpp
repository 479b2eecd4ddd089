// What the launcher costs: `launch --nproc_per_node=N EMPTY` against a plain fork and exec of as
// many such programs, in turn in one run. Prints the medians and their ratio.
//
//   bench_launch [N [ROUNDS]]      (default: 2 processes, 101 rounds)

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Starts `count` processes, each with `arguments`, and waits for them all: the milliseconds.
double run(int count, const std::vector<const char*>& arguments) {
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::execv(arguments[0], const_cast<char* const*>(arguments.data()));
      ::_exit(127);
    }
  }
  int status = 0;
  while (::wait(&status) > 0) {
    if (status != 0) {
      std::fprintf(stderr, "%s failed\n", arguments[0]);
      std::exit(1);
    }
  }
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  const int workers = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 101;
  const std::string option = "--nproc_per_node=" + std::to_string(workers);
  std::vector<double> plain;
  std::vector<double> launched;
  for (int round = 0; round < rounds; ++round) {
    plain.push_back(run(workers, {DDP_EMPTY_PROGRAM, nullptr}));
    launched.push_back(
        run(1, {DDP_LAUNCH_FOLDER "/launch", option.c_str(), DDP_EMPTY_PROGRAM, nullptr}));
  }
  const double base = median(plain);
  const double ours = median(launched);
  std::printf("%d processes, medians of %d: plain %.3f ms, launch %.3f ms, ratio %.2f\n", workers,
              rounds, base, ours, ours / base);
  return 0;
}
