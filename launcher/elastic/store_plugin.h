#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <launcher/elastic/store.h>
#include <launcher/elastic/store_abi.h>
#include <launcher/variables.h>

namespace ddp::launcher {

/// The path of the library that has the store: DDP_RENDEZVOUS_STORE, else beside the launcher or in
/// the library folder of its installation. Throws Error that says how to get it.
std::string find_store_plugin(const VariableLookup& variables);

/// That library, opened. What it loads (LibTorch) is large and starts threads: it is opened only in
/// a process that does nothing else, see Note [Agent].
class StorePlugin {
 public:
  /// Throws Error.
  explicit StorePlugin(const std::string& path);

  /// Serves a store on this port of all the machine's addresses; null where the port is taken.
  /// Throws StoreError.
  std::unique_ptr<Store> serve(uint16_t port, std::chrono::milliseconds timeout) const;

  /// Throws StoreError.
  std::unique_ptr<Store> join(const std::string& host, uint16_t port,
                              std::chrono::milliseconds timeout) const;

 private:
  const ddp_store_api* api_;
};

}  // namespace ddp::launcher
