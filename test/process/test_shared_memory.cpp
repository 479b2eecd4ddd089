#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sys/wait.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <test/support/tensors.h>
#include <unistd.h>

#include <ddp/ddp.h>

// The backend "shm" on forked ranks: what its collectives compute, in every kind of memory, and
// what is left of it. Its failures are in test_shared_memory_failure.cpp.

using ddp::ReduceOp;
using ddp::test::bits;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;
using ddp::test::within;

namespace {

void start() {
  ddp::init_process_group(ddp::InitProcessGroupOptions("shm").timeout(std::chrono::seconds(30)));
}

c10::intrusive_ptr<c10d::Backend> backend() {
  return ddp::default_group()->getBackend(c10::DeviceType::CPU);
}

/// Where a rank's tensors lie.
enum class Memory {
  kShared,    // what the backend allocates
  kOrdinary,  // what LibTorch allocates
};

at::Tensor in(Memory memory, const at::Tensor& values) {
  if (memory == Memory::kOrdinary) {
    return values.clone();
  }
  auto tensor = backend()->allocateTensor(values.numel(), values.options());
  tensor.copy_(values.flatten());
  return tensor;
}

/// Small whole numbers of rank `rank`, exact in every dtype: 1 to 4; bools for kBool.
at::Tensor values(int rank, at::ScalarType dtype, std::int64_t count) {
  return (at::arange(count, at::kLong) + rank)
      .remainder(4)
      .add(dtype == at::kBool ? -1 : 1)
      .to(dtype);
}

at::Tensor combined(ReduceOp::RedOpType op, int size, at::ScalarType dtype, std::int64_t count) {
  const auto wide = at::isFloatingType(dtype) ? at::kDouble : dtype;
  auto result = values(0, dtype, count).to(wide);
  for (int rank = 1; rank < size; ++rank) {
    const auto next = values(rank, dtype, count).to(wide);
    result = op == ReduceOp::MAX    ? at::maximum(result, next)
             : op == ReduceOp::BXOR ? result.bitwise_xor(next)
             : dtype == at::kBool   ? result.bitwise_or(next)
                                    : result + next;
  }
  return (op == ReduceOp::AVG ? result / size : result).to(dtype);
}

/// What is wrong with the collectives of one dtype and size; "" if nothing.
std::string wrong(const Rank& rank, Memory memory, at::ScalarType dtype, std::int64_t count) {
  const int own = rank.rank();
  const int size = rank.world_size();
  const auto mine = values(own, dtype, count);
  std::string names;
  const auto check = [&](const std::string& name, const at::Tensor& found,
                         const at::Tensor& expected) {
    if (!found.view({-1}).equal(expected)) {
      names += name + " of " + std::to_string(count) + " " + c10::toString(dtype) + "; ";
    }
  };
  std::vector<ReduceOp::RedOpType> ops = {ReduceOp::SUM, ReduceOp::MAX};
  if (dtype == at::kFloat || dtype == at::kDouble) {
    ops.push_back(ReduceOp::AVG);
  } else if (!at::isFloatingType(dtype)) {
    ops.push_back(ReduceOp::BXOR);
  }
  for (const auto op : ops) {
    const auto expected = combined(op, size, dtype, count);
    // A third is not exact; see the bits of averages below.
    const auto close = [&](const std::string& name, const at::Tensor& found) {
      const bool is_exact = op != ReduceOp::AVG;
      check(name, is_exact || !at::allclose(found.view({-1}), expected) ? found : expected,
            expected);
    };
    auto tensor = in(memory, mine);
    ddp::all_reduce(tensor, op);
    close("all_reduce", tensor);
    tensor = in(memory, mine);
    ddp::reduce(tensor, ddp::ReduceOptions(size - 1).op(op));
    if (own == size - 1) {
      close("reduce", tensor);
    }
    const auto output = in(memory, at::zeros_like(mine));
    ddp::reduce_scatter_tensor(output, in(memory, mine.repeat({size})), op);
    close("reduce_scatter_tensor", output);
    output.zero_();
    ddp::reduce_scatter(output, std::vector<at::Tensor>(size, in(memory, mine)), op);
    close("reduce_scatter", output);
  }
  const auto tensor = in(memory, mine);
  ddp::broadcast(tensor, size - 1);
  check("broadcast", tensor, values(size - 1, dtype, count));
  std::vector<at::Tensor> all;
  std::vector<at::Tensor> gathered;
  for (int other = 0; other < size; ++other) {
    all.push_back(values(other, dtype, count));
    gathered.push_back(in(memory, at::zeros_like(mine)));
  }
  ddp::all_gather(gathered, in(memory, mine));
  for (int other = 0; other < size; ++other) {
    check("all_gather", gathered[other], all[other]);
  }
  const auto whole = in(memory, at::zeros_like(at::cat(all)));
  ddp::all_gather_into_tensor(whole, in(memory, mine));
  check("all_gather_into_tensor", whole, at::cat(all));
  return names;
}

int count_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:ddp") != std::string::npos ? 1 : 0;
  }
  return count;
}

/// Bytes of shared memory that the process has in all.
long shared_kilobytes() {
  std::ifstream status("/proc/self/smaps");
  long sum = 0;
  bool is_ours = false;
  for (std::string line; std::getline(status, line);) {
    if (line.find('-') < line.find(' ')) {
      is_ours = line.find("/memfd:ddp") != std::string::npos;
    } else if (is_ours && line.rfind("Rss:", 0) == 0) {
      sum += std::stol(line.substr(4));
    }
  }
  return sum;
}

int count_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<int>(std::distance(begin(files), end(files)));
}

/// The backend's own threads.
int count_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    count += std::getline(file, name) && name == "ddp-shm" ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST_CASE("every collective and dtype through shared memory, at every size, from every memory") {
  const std::vector<at::ScalarType> dtypes = {at::kFloat,    at::kDouble, at::kHalf,
                                              at::kBFloat16, at::kChar,   at::kByte,
                                              at::kInt,      at::kLong,   at::kBool};
  for (const int size : {2, 3, 4}) {
    const auto results = run_ranks(
        size,
        [&](const Rank& rank) {
          start();
          rank.report("backend", ddp::get_backend());
          std::string errors;
          // Memory of all ranks: ordinary, shared, in turn.
          for (const int mix : {0, 1, 2}) {
            const bool shared = mix == 1 || (mix == 2 && rank.rank() % 2 == 1);
            for (const auto dtype : dtypes) {
              // Through the mailboxes, in one piece, in several.
              for (const std::int64_t count : {1000, 20001, 150001}) {
                if (count < 100000 || dtype == at::kFloat) {
                  errors += wrong(rank, shared ? Memory::kShared : Memory::kOrdinary, dtype, count);
                }
              }
            }
          }
          ddp::barrier();
          rank.report("wrong", errors);
          ddp::destroy_process_group();
        },
        within(120));
    INFO(summary(results));
    for (const auto& result : results) {
      CHECK(result.status == 0);
      CHECK(result["backend"] == "shm");
      CHECK(result["wrong"].empty());
    }
  }
}

TEST_CASE("sums and averages have the same bits on all ranks, and Gloo's on two") {
  for (const int size : {2, 3}) {
    const auto results = run_ranks(
        size,
        [](const Rank& rank) {
          start();
          const auto gloo = ddp::new_group({}, ddp::NewGroupOptions().backend("gloo"));
          rank.report("gloo", ddp::get_backend(gloo));
          at::manual_seed(17 + rank.rank());
          for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
            for (const std::int64_t count : {1000, 100003}) {
              const auto mine = at::randn({count}).to(dtype);
              for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
                const auto name = std::string(c10::toString(dtype)) + std::to_string(op) + "/" +
                                  std::to_string(count);
                const auto ours = mine.clone();
                ddp::all_reduce(ours, op);
                rank.report(name + " shm", bits(ours));
                const auto theirs = mine.clone();
                ddp::all_reduce(theirs, op, gloo);
                rank.report(name + " gloo", bits(theirs));
              }
            }
          }
          ddp::destroy_process_group();
        },
        within(60));
    CHECK(results[0].status == 0);
    CHECK(results[0]["gloo"] == "gloo");
    int count = 0;
    for (const auto& [name, value] : results[0].values) {
      if (name.find(" shm") != std::string::npos) {
        ++count;
        INFO(name << " on " << size << " ranks");
        for (int rank = 1; rank < size; ++rank) {
          CHECK((results[rank][name] == value));
        }
        if (size == 2) {
          CHECK((results[0][name.substr(0, name.size() - 3) + "gloo"] == value));
        }
      }
    }
    CHECK(count == 16);
  }
}

TEST_CASE("many operations in flight are done in order, and their futures tell") {
  const auto results = run_ranks(
      3,
      [](const Rank& rank) {
        start();
        constexpr int kCount = 100;
        std::vector<at::Tensor> tensors;
        std::vector<ddp::Work> works;
        for (int index = 0; index < kCount; ++index) {
          tensors.push_back(
              in(index % 3 == rank.rank() ? Memory::kShared : Memory::kOrdinary,
                 at::full({index % 4 == 0 ? 10 : 6000 + index}, rank.rank() + 1.0F + index)));
          if (index % 5 == 4) {
            works.push_back(
                ddp::broadcast(tensors[index], ddp::BroadcastOptions(index % 3).async_op(true)));
          } else {
            works.push_back(ddp::all_reduce(tensors[index],
                                            ddp::AllReduceOptions(ReduceOp::SUM).async_op(true)));
          }
        }
        // Followed by one that need not go through the queue's thread, and must not overtake.
        const auto last = at::ones({1});
        ddp::all_reduce(last);
        RANK_CHECK(last.item<float>() == 3);
        for (int index = kCount; index-- > 0;) {
          RANK_CHECK(works[index].is_completed());
          works[index].wait();
          const float expected =
              index % 5 == 4 ? index % 3 + 1.0F + index : 6.0F + 3.0F * static_cast<float>(index);
          RANK_CHECK(tensors[index].eq(expected).all().item<bool>());
        }
        // A future's callback, on whatever thread, may call the next collective.
        std::vector<at::Tensor> first{at::full({5000}, rank.rank() + 1.0F)};
        const auto second = at::ones({5000});
        const auto work = ddp::default_group()->allreduce(first);
        const auto done = work->getFuture()->then(
            [&](c10::ivalue::Future& future) {
              const auto sum = future.value().toTensorVector()[0];
              second.copy_(sum);
              ddp::all_reduce(second);
              return c10::IValue(1);
            },
            c10::IntType::get());
        done->wait();
        RANK_CHECK(second.eq(18).all().item<bool>());
        RANK_CHECK(work->isCompleted() && work->isSuccess());
        RANK_CHECK(work->result()[0].data_ptr() == first[0].data_ptr());
        ddp::destroy_process_group();
      },
      within(60));
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE("what the backend has no path for goes over Gloo beside it") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    const int next = (rank.rank() + 1) % 3;
    const auto received = at::zeros({4});
    const auto sending =
        ddp::send(at::full({4}, rank.rank() + 1.0F), ddp::SendOptions(next).async_op(true));
    ddp::recv(received, (rank.rank() + 2) % 3);
    RANK_CHECK(received[0].item<float>() == static_cast<float>((rank.rank() + 2) % 3 + 1));
    const auto output = at::zeros({3});
    ddp::all_to_all_single(output, at::full({3}, rank.rank() + 1.0F));
    RANK_CHECK(output.equal(at::tensor({1.0F, 2.0F, 3.0F})));
    std::vector<at::Tensor> outputs;
    for (int other = 0; rank.rank() == 1 && other < 3; ++other) {
      outputs.push_back(at::zeros({1}));
    }
    ddp::gather(at::full({1}, rank.rank() + 1.0F), outputs, 1);
    RANK_CHECK(rank.rank() != 1 || outputs[2].item<float>() == 3);
    std::vector<at::Tensor> sparse{at::full({2}, rank.rank() + 1.0F).to_sparse()};
    const auto work = ddp::default_group()->allreduce(sparse);
    work->wait();
    RANK_CHECK(work->result()[0].to_dense().equal(at::full({2}, 6.0F)));
    ddp::monitored_barrier();
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

namespace {

/// Whether the tensor lies in memory that the other ranks reach.
bool is_shared(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    RANK_CHECK(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2);
    if (begin <= address && address < end) {
      return line.find("/memfd:ddp") != std::string::npos;
    }
  }
  return false;
}

}  // namespace

TEST_CASE("buckets lie in shared memory: their reduction copies nothing in") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    torch::manual_seed(1);
    torch::nn::Linear layer(100, 100);
    ddp::DistributedDataParallel model(
        layer, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
    for (int step = 0; step < 3; ++step) {
      layer->zero_grad();
      model(at::full({4, 100}, rank.rank() + 1.0F)).sum().backward();
      RANK_CHECK(is_shared(layer->weight.grad()));
      RANK_CHECK(at::allclose(layer->weight.grad(), at::full({100, 100}, 6.0F)));
    }
    rank.report("bits", bits(layer->weight.grad()));
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK(results[1].status == 0);
  CHECK(results[0]["bits"] == results[1]["bits"]);
}

TEST_CASE("a tensor's shared memory is given back when it dies, on all ranks") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    constexpr std::int64_t kElements = 1 << 20;
    const auto settle = [] { ddp::barrier(); };
    {
      const auto small = in(Memory::kOrdinary, at::ones({20000}));
      ddp::all_reduce(small);  // the staging memory is there from now on
    }
    settle();
    const auto before = shared_kilobytes();
    for (int round = 0; round < 20; ++round) {
      {
        const auto tensor = in(Memory::kShared, at::full({kElements}, rank.rank() + 1.0F));
        ddp::all_reduce(tensor);
        RANK_CHECK(tensor.eq(3).all().item<bool>());
        RANK_CHECK(shared_kilobytes() - before >= 4096);
        settle();
      }
      settle();
    }
    rank.report("kilobytes", shared_kilobytes() - before);
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(std::abs(std::stol(result["kilobytes"])) < 100);
  }
}

TEST_CASE("after the end nothing is left: no memory, descriptor or thread; a tensor stays") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    const auto round = [&] {
      start();
      const auto tensor = in(Memory::kShared, at::full({100000}, rank.rank() + 1.0F));
      ddp::all_reduce(tensor, ddp::AllReduceOptions(ReduceOp::SUM).async_op(true)).wait();
      ddp::all_reduce(in(Memory::kOrdinary, tensor));
      RANK_CHECK(count_threads() == 1);
      ddp::destroy_process_group();
      RANK_CHECK(count_threads() == 0);
      return tensor;
    };
    round();  // LibTorch's own
    const int files = count_files();
    RANK_CHECK(count_mappings() == 0);
    auto tensor = round();
    RANK_CHECK(tensor.eq(3).all().item<bool>());
    tensor.fill_(7);  // still this process's memory
    RANK_CHECK(count_mappings() > 0);
    tensor.reset();
    RANK_CHECK(count_mappings() == 0);
    RANK_CHECK(count_files() == files);
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}

TEST_CASE("a process that a rank forks and that ends takes nothing from the rank") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    auto tensor = in(Memory::kShared, at::full({50000}, rank.rank() + 1.0F));
    ddp::all_reduce(tensor, ddp::AllReduceOptions(ReduceOp::SUM).async_op(true)).wait();
    const pid_t child = fork();
    if (child == 0) {
      tensor.reset();
      std::exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    RANK_CHECK(status == 0);
    RANK_CHECK(tensor.eq(3).all().item<bool>());
    ddp::all_reduce(tensor);
    RANK_CHECK(tensor.eq(6).all().item<bool>());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
  }
}
