#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/nccl/cuda_device.h>
#include <ddp/process_group/nccl/open_plugin.h>

namespace ddp::detail {

std::string cuda_device_problem(int local_rank, const std::string& words) {
  const auto begin = fmt::format("cuda:{} cannot be used: {}. ", local_rank, words);
  if (words.find("busy or unavailable") != std::string::npos) {
    return begin +
           "Another process has it and it is in exclusive mode (nvidia-smi shows both; nvidia-smi "
           "-c DEFAULT as root ends the mode), or two ranks of this job share it: start as many "
           "processes as there are GPUs, launch --nproc-per-node=gpu";
  }
  if (words.find("out of memory") != std::string::npos) {
    return begin +
           "Other processes have its memory (nvidia-smi lists them): end them, or choose "
           "other GPUs with CUDA_VISIBLE_DEVICES";
  }
  if (words.find("driver version is insufficient") != std::string::npos) {
    return begin +
           "The driver is older than LibTorch's CUDA: update it (nvidia-smi shows the CUDA "
           "version that it serves), or take a LibTorch of an older CUDA";
  }
  if (words.find("without ATen_cuda") != std::string::npos) {
    return begin +
           "LibTorch was asked about CUDA before its CUDA half was loaded, and remembers that "
           "there "
           "is none (torch::manual_seed, torch::cuda::is_available and others ask): call "
           "ddp::init_process_group() before them, or link the program with LibTorch's CUDA half "
           "(-Wl,--no-as-needed -ltorch_cuda)";
  }
  return begin + "nvidia-smi shows whether the GPU and its driver work";
}

const NcclPlugin& use_cuda_device(int local_rank, const std::string& who) {
  const auto devices = find_cuda_devices();
  if (devices.count == 0) {
    throw UsageError(
        fmt::format("{}NCCL needs a GPU, and {}. Run it where there is one, or train on the CPU: "
                    "init_process_group(\"gloo\")",
                    who, devices.problem));
  }
  if (local_rank >= devices.count) {
    throw UsageError(fmt::format(
        "{}the local rank is {}, but this machine has {} visible GPU{} (CUDA_VISIBLE_DEVICES={}): "
        "start one process for each, launch --nproc-per-node=gpu, or train on the CPU, "
        "init_process_group(\"gloo\")",
        who, local_rank, devices.count, devices.count == 1 ? "" : "s",
        environment("CUDA_VISIBLE_DEVICES").value_or("")));
  }
  const auto& plugin = open_nccl_plugin(who);
  try {
    plugin.set_device(local_rank);
  } catch (const std::exception& error) {
    throw UsageError(who + cuda_device_problem(local_rank, concise(error)));
  }
  return plugin;
}

}  // namespace ddp::detail
