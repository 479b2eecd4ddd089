#include <sstream>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/csrc/distributed/c10d/debug.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/connections.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/gloo_backend.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {
namespace {

/// Gloo's own way to close connections (Context::closeConnections) tells the peers, but not this
/// process's threads: an operation in flight goes on waiting for Gloo's timeout, and destroying the
/// group waits for it. Shut down from outside, the sockets end both.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void set_connections(Connections connections) { connections_ = std::move(connections); }

  void abort() override {
    shut_down(connections_);
    if (connections_.empty()) {
      // Connected lazily (TORCH_GLOO_LAZY_INIT).
      for (const auto& context : contexts_) {
        context->closeConnections();
      }
    }
  }

 private:
  Connections connections_;
};

/// c10d's wrapper forwards neither `abort` nor `setTimeout`.
class CheckedBackend final : public c10d::ProcessGroupWrapper {
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
  if (c10d::debug_level() != c10d::DebugLevel::Detail) {
    return backend;
  }
  const auto helper = connect(
      c10::make_intrusive<c10d::PrefixStore>("pg_wrapper:" + settings.name, store), settings);
  return c10::make_intrusive<CheckedBackend>(backend, helper);
}

}  // namespace ddp::detail
