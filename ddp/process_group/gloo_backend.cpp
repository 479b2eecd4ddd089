#include <ddp/process_group/gloo_backend.h>

#include <sstream>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/error_text.h>

namespace ddp::detail {
namespace {

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void abort() override {
    for (const auto& context : contexts_) {
      context->closeConnections();
    }
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    const std::string& address,
                                                    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const bool lazy = c10d::getDefaultGlooLazyInit();
  try {
    if (const auto interfaces = environment("GLOO_SOCKET_IFNAME")) {
      std::istringstream names(*interfaces);
      for (std::string name; std::getline(names, name, ',');) {
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name, lazy));
      }
    } else {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address, lazy));
    }
  } catch (const std::exception& error) {
    throw UsageError(fmt::format(
        "rank {}: Gloo cannot use {} ({}). Set GLOO_SOCKET_IFNAME to the interface that reaches the other "
        "ranks (`ip addr` lists them).",
        rank,
        environment("GLOO_SOCKET_IFNAME") ? "GLOO_SOCKET_IFNAME=" + *environment("GLOO_SOCKET_IFNAME")
                                          : "the address " + address,
        concise(error)));
  }
  // One thread an operation in flight, two at most, as Python's default.
  options->threads = static_cast<int>(options->devices.size()) * 2;
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options);
}

}  // namespace ddp::detail
