#include <algorithm>
#include <atomic>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/csrc/distributed/c10d/debug.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/connected.h>
#include <ddp/process_group/connections.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {
namespace {

/// Gloo's own way to close connections (Context::closeConnections) tells the peers, but not this
/// process's threads: an operation in flight goes on waiting for Gloo's timeout, and destroying the
/// group waits for it. Shut down from outside, the sockets end most of them. One that waits behind
/// a message that nobody wants any more (see Note [Watched waits]) never sees the end of its
/// socket; it ends, with all others of the group, when a receive times out. What even this does not
/// end is left behind, and with it the backend, whose destruction would wait for it.
class GlooBackend final : public c10d::ProcessGroupGloo, public Connected {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void set_connections(Connections connections) { connections_ = std::move(connections); }

  void abort() override {
    if (connections_.empty()) {
      // Connected lazily (TORCH_GLOO_LAZY_INIT), or alone.
      for (const auto& context : contexts_) {
        context->closeConnections();
      }
      return;
    }
    shut_down(connections_);
    for (std::size_t index = 0; index < contexts_.size(); ++index) {
      time_out(index);
    }
    constexpr std::chrono::milliseconds kPatience(500);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!is_idle()) {
      if (std::chrono::steady_clock::now() > deadline) {
        if (!left_behind_.exchange(true)) {
          c10::raw::intrusive_ptr::incref(this);
        }
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  int peers_gone() const override {
    // One connection to each peer on each device.
    const auto devices = static_cast<int>(std::max<std::size_t>(1, contexts_.size()));
    return (count_closed(connections_) + devices - 1) / devices;
  }

 private:
  void time_out(std::size_t context) {
    // c10d takes the context by the tag. The tag is none of a program's, and nothing comes.
    constexpr std::size_t kTag = std::size_t{1} << 30;
    const auto tag = kTag - kTag % contexts_.size() + context;
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    try {
      recvAnysource(nothing, static_cast<int>(tag))->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // Its timeout, which is what it is for.
    }
  }

  bool is_idle() {
    const std::lock_guard lock(workMutex_);
    return workQueue_.empty() && std::all_of(workInProgress_.begin(), workInProgress_.end(),
                                             [](const auto& work) { return !work; });
  }

  Connections connections_;
  std::atomic<bool> left_behind_{false};
};

/// c10d's wrapper forwards neither `abort` nor `setTimeout`.
class CheckedBackend final : public c10d::ProcessGroupWrapper, public Connected {
 public:
  CheckedBackend(const c10::intrusive_ptr<c10d::Backend>& backend,
                 const c10::intrusive_ptr<c10d::Backend>& helper)
      : ProcessGroupWrapper(backend, helper), helper_(helper) {}

  void abort() override {
    getWrappedPg()->abort();
    helper_->abort();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    getWrappedPg()->setTimeout(timeout);
  }

  int peers_gone() const override {
    return dynamic_cast<const Connected&>(*getWrappedPg()).peers_gone();
  }

 private:
  c10::intrusive_ptr<c10d::Backend> helper_;
};

c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                          const GlooSettings& settings) {
  auto options = c10d::ProcessGroupGloo::Options::create(settings.connect_timeout);
  options->devices = settings.devices;
  // One thread an operation in flight, two at most on a device, as Python's default.
  options->threads = static_cast<int>(options->devices.size()) * 2;
  const auto earlier = open_connections();
  auto backend =
      c10::make_intrusive<GlooBackend>(store, settings.rank, settings.world_size, options);
  auto connections = opened_since(earlier, open_connections());
  // Rank 0 serves the store, to which others connect meanwhile.
  const auto store_port = tcp_port_of(store).value_or(0);
  std::erase_if(connections, [store_port](const Connection& one) {
    return one.local_port == store_port || one.peer_port == store_port;
  });
  backend->set_connections(std::move(connections));
  backend->setTimeout(settings.timeout);
  return backend;
}

}  // namespace

int peers_gone(c10d::ProcessGroup& group) {
  try {
    const auto backend = group.getBackend(c10::DeviceType::CPU);
    const auto* connected = dynamic_cast<const Connected*>(backend.get());
    return connected != nullptr ? connected->peers_gone() : 0;
  } catch (const std::exception&) {
    return 0;  // no backend for the CPU
  }
}

bool gloo_connects_lazily() { return c10d::getDefaultGlooLazyInit(); }

GlooDevices make_gloo_devices(int rank, const std::string& address) {
  GlooDevices devices;
  const bool lazy = c10d::getDefaultGlooLazyInit();
  std::string tried = "the address " + address;
  try {
    if (const auto interfaces = environment("GLOO_SOCKET_IFNAME")) {
      std::istringstream names(*interfaces);
      for (std::string name; std::getline(names, name, ',');) {
        tried = fmt::format("the interface \"{}\" of GLOO_SOCKET_IFNAME={}", name, *interfaces);
        devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name, lazy));
      }
    } else {
      devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address, lazy));
    }
  } catch (const std::exception& error) {
    throw UsageError(
        fmt::format("rank {}: Gloo cannot use {} ({}). Set GLOO_SOCKET_IFNAME to the interface "
                    "that reaches the other "
                    "ranks (`ip addr` lists them).",
                    rank, tried, concise(error)));
  }
  return devices;
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const GlooSettings& settings) {
  const auto backend = connect(store, settings);
  // Python's order: the number before the wrapper.
  backend->setSequenceNumberForGroup();
  return backend;
}

c10::intrusive_ptr<c10d::Backend> checked(const c10::intrusive_ptr<c10d::Backend>& backend,
                                          const c10::intrusive_ptr<c10d::Store>& store,
                                          const GlooSettings& settings) {
  if (c10d::debug_level() != c10d::DebugLevel::Detail) {
    return backend;
  }
  const auto helper = connect(
      c10::make_intrusive<c10d::PrefixStore>("pg_wrapper:" + settings.name, store), settings);
  return c10::make_intrusive<CheckedBackend>(backend, helper);
}

}  // namespace ddp::detail
