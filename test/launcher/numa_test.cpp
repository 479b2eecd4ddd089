// Which cores a worker gets, over made-up machines: as torch/numa/binding.py chooses them.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <launcher/error.h>
#include <launcher/numa.h>

#include "catch2.h"

using namespace ddp::launcher;

namespace {

/// A folder as /sys, with what its setters put there.
class FakeSys {
 public:
  FakeSys() {
    char name[] = "/tmp/fake-sys-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    root_ = name;
  }
  FakeSys(const FakeSys&) = delete;
  FakeSys& operator=(const FakeSys&) = delete;
  ~FakeSys() { std::filesystem::remove_all(root_); }

  const std::string& root() const { return root_; }

  void nodes(const std::string& list) { write("devices/system/node/has_cpu", list); }

  void node(int node, const std::string& cores) {
    write("devices/system/node/node" + std::to_string(node) + "/cpulist", cores);
  }

  void gpu(const std::string& address, const std::string& node) {
    write("bus/pci/devices/" + address + "/numa_node", node);
  }

  void core(int core, const std::string& socket, const std::string& siblings,
            const std::string& third_level) {
    const std::string folder = "devices/system/cpu/cpu" + std::to_string(core);
    write(folder + "/topology/physical_package_id", socket);
    write(folder + "/topology/thread_siblings_list", siblings);
    const std::string cache[][3] = {{"Data", "1", siblings},
                                    {"Instruction", "9", "0-1000"},
                                    {"Unified", "3", third_level},
                                    {"Unified", "2", siblings}};
    for (int i = 0; i < 4; ++i) {
      const std::string index = folder + "/cache/index" + std::to_string(i);
      write(index + "/type", cache[i][0]);
      write(index + "/level", cache[i][1]);
      write(index + "/shared_cpu_list", cache[i][2]);
    }
  }

 private:
  void write(const std::string& path, const std::string& line) {
    const std::filesystem::path whole = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << line << '\n';
  }

  std::string root_;
};

CpuSet range(int first, int last) {
  CpuSet cores;
  for (int core = first; core <= last; ++core) cores.push_back(core);
  return cores;
}

/// Two sockets of two nodes of four physical cores of two threads: node n has the cores 4n to
/// 4n+3 and, as their second threads, 16+4n to 16+4n+3. Two cores share a cache.
void make_big_machine(FakeSys& sys) {
  sys.nodes("0-3");
  for (int node = 0; node < 4; ++node) {
    const int first = 4 * node;
    const auto list = [](int a, int b) {
      return std::to_string(a) + "-" + std::to_string(b) + "," + std::to_string(16 + a) + "-" +
             std::to_string(16 + b);
    };
    sys.node(node, list(first, first + 3));
    for (int i = 0; i < 4; ++i) {
      const int core = first + i;
      const int pair = first + i / 2 * 2;
      for (const int thread : {core, 16 + core}) {
        sys.core(thread, std::to_string(node / 2),
                 std::to_string(core) + "," + std::to_string(16 + core), list(pair, pair + 1));
      }
    }
  }
}

Gpus gpus(std::vector<std::string> addresses) {
  Gpus result;
  result.pci_addresses = std::move(addresses);
  return result;
}

using Sets = std::vector<CpuSet>;

std::string refusal(NumaBinding binding, int workers, const Gpus& gpus,
                    const CpuTopology& topology) {
  try {
    numa_cpus(binding, workers, gpus, topology);
  } catch (const Error& error) {
    CHECK(error.status() == ExitStatus::kSetup);
    return error.what();
  }
  return "(accepted)";
}

}  // namespace

TEST_CASE("the names of the ways to bind") {
  CHECK(numa_binding("node") == NumaBinding::kNode);
  CHECK(numa_binding("socket") == NumaBinding::kSocket);
  CHECK(numa_binding("exclusive") == NumaBinding::kExclusive);
  CHECK(numa_binding("core-complex") == NumaBinding::kCoreComplex);
  CHECK(numa_binding("core_complex") == NumaBinding::kCoreComplex);
  CHECK(numa_binding("none") == NumaBinding::kNone);
}

TEST_CASE("lists of cores are read and written in the kernel's form") {
  CHECK(parse_cpu_list("0-2,8,5") == CpuSet{0, 1, 2, 5, 8});
  CHECK(parse_cpu_list("1,0-1") == CpuSet{0, 1});
  CHECK(parse_cpu_list("").empty());
  CHECK(cpu_list({0, 1, 2, 5, 8, 9}) == "0-2,5,8-9");
  CHECK(cpu_list({}).empty());
}

TEST_CASE("node and socket: by the place of the GPU, and of the allowed cores only") {
  FakeSys sys;
  make_big_machine(sys);
  sys.gpu("0000:01:00.0", "3");
  sys.gpu("0000:02:00.0", "0");
  const Gpus two = gpus({"0000:01:00.0", "0000:02:00.0"});
  const CpuTopology whole(range(0, 31), sys.root());
  CHECK(numa_cpus(NumaBinding::kNode, 2, two, whole) ==
        Sets{{12, 13, 14, 15, 28, 29, 30, 31}, {0, 1, 2, 3, 16, 17, 18, 19}});
  CHECK(numa_cpus(NumaBinding::kNode, 1, two, whole).size() == 1);
  const Sets sockets = numa_cpus(NumaBinding::kSocket, 2, two, whole);
  CHECK(sockets == Sets{parse_cpu_list("8-15,24-31"), parse_cpu_list("0-7,16-23")});
  // A node that the launcher may not use is no reason to fail for who belongs elsewhere.
  const CpuTopology part(parse_cpu_list("0-3,12"), sys.root());
  CHECK(numa_cpus(NumaBinding::kSocket, 2, two, part) == Sets{{12}, {0, 1, 2, 3}});
  CHECK_THAT(refusal(NumaBinding::kNode, 2, two, CpuTopology({12}, sys.root())),
             ContainsSubstring("no core of NUMA node 0, where local rank 1 belongs"));
}

TEST_CASE("a GPU whose node the kernel does not know belongs to the first") {
  FakeSys sys;
  make_big_machine(sys);
  sys.gpu("0000:01:00.0", "-1");
  const CpuTopology topology(range(0, 31), sys.root());
  CHECK(numa_cpus(NumaBinding::kNode, 1, gpus({"0000:01:00.0"}), topology)[0][0] == 0);
  CHECK(numa_cpus(NumaBinding::kNode, 1, gpus({"0000:77:00.0"}), topology)[0][0] == 0);
}

TEST_CASE("exclusive: whole physical cores, divided among the GPUs of the node") {
  FakeSys sys;
  make_big_machine(sys);
  for (const char* gpu : {"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}) sys.gpu(gpu, "1");
  sys.gpu("0000:04:00.0", "2");
  const Gpus four = gpus({"0000:01:00.0", "0000:02:00.0", "0000:04:00.0", "0000:03:00.0"});
  const CpuTopology topology(range(0, 31), sys.root());
  CHECK(numa_cpus(NumaBinding::kExclusive, 4, four, topology) ==
        Sets{{4, 5, 20, 21}, {6, 22}, parse_cpu_list("8-11,24-27"), {7, 23}});
  // GPUs that no worker has count as well.
  CHECK(numa_cpus(NumaBinding::kExclusive, 1, four, topology) == Sets{{4, 5, 20, 21}});
  // A second thread alone stands for its physical core.
  CHECK(numa_cpus(NumaBinding::kExclusive, 2, four, CpuTopology({5, 20, 22}, sys.root())) ==
        Sets{{20}, {5}});
  CHECK_THAT(refusal(NumaBinding::kExclusive, 1, four, CpuTopology({4, 5, 20}, sys.root())),
             ContainsSubstring("2 physical cores of NUMA node 1 are too few for the 3"));
}

TEST_CASE("core-complex: one shared cache each, the largest groups first, then again") {
  FakeSys sys;
  make_big_machine(sys);
  for (const char* gpu : {"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}) sys.gpu(gpu, "1");
  const Gpus three = gpus({"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"});
  CHECK(numa_cpus(NumaBinding::kCoreComplex, 3, three, CpuTopology(range(0, 31), sys.root())) ==
        Sets{{4, 5, 20, 21}, {6, 7, 22, 23}, {4, 5, 20, 21}});
  CHECK(numa_cpus(NumaBinding::kCoreComplex, 2, three, CpuTopology({4, 6, 7}, sys.root())) ==
        Sets{{6, 7}, {4}});
}

TEST_CASE("without GPUs the machine's nodes take their place") {
  FakeSys sys;
  make_big_machine(sys);
  const CpuTopology topology(range(0, 31), sys.root());
  const Sets node = numa_cpus(NumaBinding::kNode, 4, Gpus(), topology);
  for (int worker = 0; worker < 4; ++worker)
    CHECK(node[static_cast<size_t>(worker)].front() == 4 * worker);
  const Sets exclusive = numa_cpus(NumaBinding::kExclusive, 8, Gpus(), topology);
  CHECK(exclusive[0] == CpuSet{0, 1, 16, 17});
  CHECK(exclusive[1] == CpuSet{2, 3, 18, 19});
  CHECK(exclusive[7] == CpuSet{14, 15, 30, 31});
  CHECK_THAT(refusal(NumaBinding::kExclusive, 17, Gpus(), topology),
             ContainsSubstring("4 physical cores of NUMA node 0 are too few for the 5"));
}

TEST_CASE("a machine that does not tell, or has too few GPUs, is an error that says what to do") {
  FakeSys sys;
  const CpuTopology silent(range(0, 3), sys.root());
  CHECK_THAT(refusal(NumaBinding::kNode, 1, Gpus(), silent),
             ContainsSubstring("does not tell its NUMA nodes (" + sys.root()));
  sys.nodes("0");
  sys.node(0, "0-3");
  CHECK(numa_cpus(NumaBinding::kNode, 1, Gpus(), silent) == Sets{{0, 1, 2, 3}});
  const std::pair<NumaBinding, const char*> missing[] = {
      {NumaBinding::kSocket, "its sockets"},
      {NumaBinding::kExclusive, "its physical cores"},
      {NumaBinding::kCoreComplex, "its caches"}};
  for (const auto& [binding, what] : missing)
    CHECK_THAT(refusal(binding, 1, Gpus(), silent), ContainsSubstring(what));
  CHECK_THAT(refusal(NumaBinding::kNode, 2, gpus({"0000:01:00.0"}), silent),
             ContainsSubstring("2 workers, but 1 visible GPU"));
}
