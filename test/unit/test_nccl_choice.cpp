#include <test/support/catch2.h>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/error.h>
#include <ddp/module_devices.h>
#include <ddp/process_group/backend_choice.h>
#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/nccl/cuda_device.h>

// Which backend a name means, and what is said where CUDA or NCCL cannot be used.

using ddp::detail::BackendChoice;
using ddp::detail::cuda_device_problem;
using ddp::detail::parse_backend_names;
using ddp::detail::StoreChannel;

TEST_CASE("the backend's name, for all devices or for each") {
  const auto meaning = [](const std::string& text) {
    const auto names = parse_backend_names(text);
    return names ? "cpu=" + names->cpu + (names->nccl ? " nccl" : "") : "none";
  };
  CHECK(meaning("") == "cpu=");
  CHECK(meaning("gloo") == "cpu=gloo");
  CHECK(meaning("shm") == "cpu=shm");
  CHECK(meaning("cpu:shm") == "cpu=shm");
  for (const auto* const text : {"nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"}) {
    CHECK(meaning(text) == "cpu=gloo nccl");
  }
  CHECK(meaning("cpu:shm,cuda:nccl") == "cpu=shm nccl");
  for (const auto* const text : {"mpi", "cuda:gloo", "cpu:nccl", "cpu:gloo,cpu:shm", "gloo,nccl",
                                 "cuda:nccl,cuda:nccl", "NCCL"}) {
    CHECK(meaning(text) == "none");
  }
}

TEST_CASE("a device that CUDA refuses, by its words") {
  CHECK_THAT(cuda_device_problem(3, "CUDA error: all CUDA-capable devices are busy or unavailable"),
             contains("cuda:3 cannot be used: CUDA error: all CUDA-capable devices are busy or "
                      "unavailable. Another process has it and it is in exclusive mode"));
  CHECK_THAT(cuda_device_problem(0, "CUDA out of memory"),
             contains("Other processes have its memory"));
  CHECK_THAT(cuda_device_problem(0, "CUDA driver version is insufficient for CUDA runtime version"),
             contains("The driver is older than LibTorch's CUDA"));
  CHECK_THAT(cuda_device_problem(0, "Cannot initialize CUDA without ATen_cuda library."),
             contains("LibTorch was asked about CUDA before its CUDA half was loaded") &&
                 contains("call ddp::init_process_group() before them"));
  CHECK_THAT(cuda_device_problem(0, "an ECC error"),
             contains("nvidia-smi shows whether the GPU and its driver work"));
}

TEST_CASE("a module that was left on the CPU while its group is over NCCL") {
  const std::vector<ddp::NamedParameter> parameters{{"fc.weight", at::ones({2})}};
  REQUIRE_THROWS_WITH(
      ddp::detail::check_backend_fits(parameters, "nccl", "rank 1 of 2: "),
      contains("rank 1 of 2: the module is on the CPU (its parameter fc.weight), and the process "
               "group is over NCCL: move it before wrapping it, module->to(ddp::local_device())"));
  ddp::detail::check_backend_fits(parameters, "gloo", "");
  ddp::detail::check_backend_fits({{"w", at::empty({2}, c10::kMeta)}}, "nccl", "");
}

TEST_CASE("ranks of one group that do not all take NCCL") {
  const auto check = [](bool second_takes_it) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    StoreChannel first(store, 0, 2, std::chrono::seconds(5));
    StoreChannel second(store, 1, 2, std::chrono::seconds(5));
    const BackendChoice choice({"gloo", true}, 0, {4, 5});
    first.announce(choice.announcement());
    second.announce(BackendChoice({"gloo", second_takes_it}, 1, {4, 5}).announcement());
    first.find_members();
    choice.check_all_take_nccl(first);
  };
  check(true);
  REQUIRE_THROWS_WITH(check(false),
                      contains("rank 4: this rank takes NCCL, and rank 5 does not (no "
                               "GPU is visible there, that ddp was built without"));
}
