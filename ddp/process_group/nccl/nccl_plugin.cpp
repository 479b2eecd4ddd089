#include <atomic>
#include <cstdlib>

#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <ddp/process_group/nccl/nccl_plugin.h>

namespace ddp::detail {
namespace {

/// c10d's own way with a failed operation is to end the process from its watchdog's thread. Here
/// the communicators are aborted instead, which ends the kernels that wait for another rank, and
/// the training thread finds the failure in the works' results.
class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  NcclBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
              const c10::intrusive_ptr<Options>& options)
      : ProcessGroupNCCL(store, rank, world_size, options) {
    if (asyncErrorHandling_ != c10d::NoHandling) {
      asyncErrorHandling_ = c10d::CleanUpOnly;
    }
  }

  /// c10d's holds its locks while NCCL waits for what still runs, and an abort would wait for them:
  /// so what runs ends first, or is aborted.
  void shutdown() override {
    waitForPendingWorks();
    if (!aborted_) {
      ProcessGroupNCCL::shutdown();
    }
  }
  void abort() override {
    aborted_ = true;
    ProcessGroupNCCL::abort();
  }

 private:
  std::atomic<bool> aborted_{false};
};

/// After a failure c10d's threads write down what ran, which takes a minute in which nothing can be
/// started or ended, and then end the process. Not so here, unless the user asks for it.
void leave_out_dumps() {
  for (const auto* const name :
       {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}) {
    setenv(name, "0", /*overwrite=*/0);
  }
}

class Plugin final : public NcclPlugin {
 public:
  void set_device(int device) const override {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
    if (prepared_ == device) {
      return;
    }
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    // Makes the context: a device that is taken is found here, and not in the first allocation.
    c10::cuda::device_synchronize();
    prepared_ = device;
  }

  c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const NcclSettings& settings) const override {
    leave_out_dumps();
    auto options = NcclBackend::Options::create();
    options->timeout = settings.timeout;
    options->group_name = settings.name;
    options->global_ranks_in_group.assign(settings.ranks.begin(), settings.ranks.end());
    auto backend =
        c10::make_intrusive<NcclBackend>(store, settings.rank, settings.world_size, options);
    backend->setBoundDeviceId(
        c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(settings.device)));
    backend->setSequenceNumberForGroup();
    return backend;
  }

  bool is_capturing() const override {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

 private:
  mutable std::atomic<int> prepared_{-1};
};

}  // namespace
}  // namespace ddp::detail

extern "C" {

__attribute__((visibility("default"))) const char* ddp_nccl_plugin_build() {
  return ddp::detail::kNcclPluginBuild;
}

__attribute__((visibility("default"))) const ddp::detail::NcclPlugin* ddp_nccl_plugin() {
  static const auto* const instance = new ddp::detail::Plugin;
  return instance;
}
}
