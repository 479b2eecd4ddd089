#include <test/support/catch2.h>
#include <test/support/ranks.h>

#include <ddp/process_group/process_group.h>

// What a program hears on a machine where NCCL cannot be used. CTest runs the cases with a driver's
// library that cannot be opened, or with one that FAKE_GPUS tells what to say.

using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

using Variables = std::map<std::string, std::string>;

/// How `body` ends on one rank with these variables.
ddp::test::RankResult run(const Variables& variables,
                          const std::function<void(const Rank&)>& body) {
  ddp::test::RankOptions options;
  options.environment = variables;
  return run_ranks(1, body, options)[0];
}

ddp::test::RankResult ask_for(const std::string& backend, const Variables& variables) {
  return run(variables, [&](const Rank& rank) {
    ddp::init_process_group(
        ddp::InitProcessGroupOptions(backend).timeout(std::chrono::seconds(30)));
    rank.report("backend", ddp::get_backend());
    rank.report("device", ddp::local_device().str());
    ddp::destroy_process_group();
  });
}

void check_refused(const ddp::test::RankResult& result, const std::string& words) {
  INFO(result.error);
  CHECK(result.error_type == "UsageError");
  CHECK_THAT(result.error, contains(words));
}

}  // namespace

TEST_CASE("without a driver only who asks for NCCL hears of it", "[no_driver]") {
  for (const auto* const backend :
       {"nccl", "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:shm,cuda:nccl"}) {
    check_refused(
        ask_for(backend, {}),
        "rank 0: init_process_group: NCCL needs a GPU, and there is no NVIDIA driver on "
        "this machine (libcuda.so.1 could not be loaded). Run it where there is one, or train "
        "on the CPU: init_process_group(\"gloo\")");
  }
  const auto result = ask_for("", {});
  CHECK(result.error.empty());
  CHECK(result["backend"] == "gloo");
  CHECK(result["device"] == "cpu");
}

TEST_CASE("a driver that shows no GPU", "[fake_driver]") {
  check_refused(
      ask_for("nccl", {{"FAKE_GPUS", ""}}),
      "NCCL needs a GPU, and no GPU is visible (nvidia-smi lists them, CUDA_VISIBLE_DEVICES "
      "chooses)");
  check_refused(ask_for("nccl", {{"FAKE_GPUS", "!999"}}), "the NVIDIA driver gives the error 999");
  CHECK(ask_for("", {{"FAKE_GPUS", "!999"}})["device"] == "cpu");
}

TEST_CASE("a local rank without a GPU", "[fake_driver]") {
  const Variables variables{
      {"FAKE_GPUS", "one two"}, {"LOCAL_RANK", "2"}, {"CUDA_VISIBLE_DEVICES", "4,5"}};
  const std::string words =
      "the local rank is 2, but this machine has 2 visible GPUs (CUDA_VISIBLE_DEVICES=4,5): start "
      "one process for each";
  check_refused(ask_for("nccl", variables), "rank 0: init_process_group: " + words);
  auto device_alone = variables;
  device_alone["DDP_NCCL_PLUGIN"] = DDP_TEST_FAKE_DRIVER;  // there, and never opened
  check_refused(run(device_alone, [](const Rank& /*rank*/) { ddp::local_device(); }),
                "local_device: " + words);
}

TEST_CASE("an NCCL plug-in that is missing, broken or foreign", "[fake_driver]") {
  Variables variables{{"FAKE_GPUS", "one"}, {"DDP_NCCL_PLUGIN", "/nowhere/libddp_nccl.so"}};
  for (const auto* const backend : {"nccl", ""}) {
    check_refused(
        ask_for(backend, variables),
        "DDP_NCCL_PLUGIN=/nowhere/libddp_nccl.so: there is no such file; it names ddp's NCCL "
        "plug-in");
  }
  variables["DDP_NCCL_PLUGIN"] = DDP_TEST_NO_LIBRARY;
  check_refused(ask_for("nccl", variables), "could not be loaded: ");
  check_refused(ask_for("nccl", variables), "It needs LibTorch's CUDA half and CUDA's libraries");
  variables["DDP_NCCL_PLUGIN"] = DDP_TEST_FAKE_DRIVER;
  check_refused(
      ask_for("nccl", variables),
      "the NCCL plug-in belongs to another build of ddp (unknown; this one is 1, LibTorch");
}

TEST_CASE("where a GPU is visible the default is NCCL, if the plug-in is there", "[fake_driver]") {
  const Variables variables{{"FAKE_GPUS", "one"}};
  const auto asked = ask_for("nccl", variables);
  const auto not_asked = ask_for("", variables);
#ifdef DDP_TEST_HAS_NCCL
  // CUDA's own library, loaded with LibTorch's CUDA half, sees through the fake driver.
  check_refused(asked, "rank 0: init_process_group: cuda:0 cannot be used: ");
  CHECK(not_asked.error == asked.error);
#else
  check_refused(asked, "this ddp was built without NCCL: libddp_nccl.so is not in");
  CHECK(not_asked["device"] == "cpu");
#endif
}
