// All-reduce over shared memory against Gloo, and against the machine's memory.
//
//   bench_all_reduce [--ranks N] [--rounds N] [--json FILE]
//
// Starts its ranks itself. In each round every rank does the same in turn: all-reduces of 4 KB, 1
// MB and 26 MB over Gloo, over shared memory with tensors that lie in it, and with ordinary ones;
// and copies 26 MB in its own memory, at the same time as the others. Prints the medians over the
// rounds of rank 0's mean times, and their ratios.
//
// An all-reduce in place of n bytes reads and writes n bytes on each rank, as a copy of n bytes
// does: "copy / all-reduce" is the part of the copy's bandwidth that it reaches.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <test/support/ranks.h>
#include <vector>

#include <ddp/ddp.h>

namespace {

using Clock = std::chrono::steady_clock;

struct Size {
  const char* name;
  std::int64_t elements;
  int gloo_repeats;
  int shm_repeats;
};
constexpr Size kSizes[] = {
    {"4 KB", 1024, 40, 400}, {"1 MB", 262144, 10, 40}, {"26 MB", 6815744, 2, 4}};

/// Mean time of a call, in seconds; all ranks begin together.
double mean_time(int repeats, const std::function<void()>& act) {
  act();
  ddp::barrier();
  const auto begin = Clock::now();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    act();
  }
  return std::chrono::duration<double>(Clock::now() - begin).count() / repeats;
}

void run_rank(const ddp::test::Rank& rank, int rounds) {
  ddp::init_process_group("shm");
  const auto gloo = ddp::new_group({}, ddp::NewGroupOptions().backend("gloo"));
  const auto group = ddp::default_group();
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  std::vector<at::Tensor> ordinary;
  std::vector<at::Tensor> shared;
  for (const auto& size : kSizes) {
    ordinary.push_back(at::zeros({size.elements}));
    shared.push_back(backend->allocateTensor(size.elements, at::kFloat).zero_());
  }
  const auto& from = ordinary.back();
  const auto to = at::ones_like(from);
  for (int round = 0; round < rounds; ++round) {
    const auto name = [&](const std::string& what) { return what + "/" + std::to_string(round); };
    for (std::size_t index = 0; index < std::size(kSizes); ++index) {
      const auto& size = kSizes[index];
      const auto prefix = std::string(size.name) + "/";
      rank.report(name(prefix + "Gloo"), mean_time(size.gloo_repeats, [&] {
                    ddp::all_reduce(ordinary[index], {}, gloo);
                  }));
      rank.report(name(prefix + "shm"),
                  mean_time(size.shm_repeats, [&] { ddp::all_reduce(shared[index], {}, group); }));
      rank.report(name(prefix + "shm, ordinary tensors"), mean_time(size.shm_repeats, [&] {
                    ddp::all_reduce(ordinary[index], {}, group);
                  }));
    }
    rank.report(name("copy"),
                mean_time(4, [&] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); }));
  }
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = 2;
  int rounds = 9;
  std::string json;
  for (int index = 1; index + 1 < argc; index += 2) {
    const std::string option = argv[index];
    if (option == "--ranks") {
      ranks = std::stoi(argv[index + 1]);
    } else if (option == "--rounds") {
      rounds = std::stoi(argv[index + 1]);
    } else if (option == "--json") {
      json = argv[index + 1];
    } else {
      std::fprintf(stderr, "usage: bench_all_reduce [--ranks N] [--rounds N] [--json FILE]\n");
      return 2;
    }
  }
  const auto results = ddp::test::run_ranks(
      ranks, [rounds](const ddp::test::Rank& rank) { run_rank(rank, rounds); },
      ddp::test::within(600));
  std::map<std::string, std::vector<double>> times;
  for (const auto& [name, value] : results[0].values) {
    times[name.substr(0, name.rfind('/'))].push_back(std::stod(value));
  }
  for (const auto& result : results) {
    if (result.status != 0) {
      std::fprintf(stderr, "%s\n", ddp::test::summary(results).c_str());
      return 1;
    }
  }
  const auto median = [&](const std::string& name) {
    auto& all = times[name];
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  };
  std::map<std::string, double> figures;
  std::printf("%d ranks, medians of %d rounds\n", ranks, rounds);
  for (const auto& size : kSizes) {
    const auto gloo = median(std::string(size.name) + "/Gloo");
    for (const char* what : {"shm", "shm, ordinary tensors"}) {
      const auto time = median(std::string(size.name) + "/" + what);
      std::printf("%-6s Gloo %9.1f us   %-22s %9.1f us   ratio %6.1f\n", size.name, gloo * 1e6,
                  what, time * 1e6, gloo / time);
      figures[std::string(size.name) + ": Gloo / " + what] = gloo / time;
    }
  }
  const auto copy = median("copy");
  for (const char* what : {"shm", "shm, ordinary tensors"}) {
    const auto time = median(std::string("26 MB/") + what);
    std::printf("26 MB  copy %9.1f us   %-22s %9.1f us   ratio %6.2f\n", copy * 1e6, what,
                time * 1e6, copy / time);
    figures[std::string("26 MB: copy / ") + what] = copy / time;
  }
  if (!json.empty()) {
    std::ofstream out(json);
    const char* separator = "{";
    for (const auto& [name, value] : figures) {
      out << separator << "\"" << name << "\": " << value;
      separator = ",\n ";
    }
    out << "}\n";
  }
  return 0;
}
