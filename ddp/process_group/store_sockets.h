#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/connections.h>

// Note [A store that does not answer]
// c10d's TCPStore client waits without a limit for the answer to a request, whatever its timeout:
// where the serving process is stopped, or where something else listens on the port and never
// answers, the call never returns, and the object has no function that would end it. Its socket
// does: once shut down, the call ends with c10::DistNetworkError. So these functions find the
// sockets by their peer's port.

namespace ddp::detail {

/// The port of the TCP store behind `store` and its prefixes; nothing for another kind of store.
std::optional<std::uint16_t> tcp_port_of(const c10::intrusive_ptr<c10d::Store>& store);

/// The connections of this process to a peer's port `port`. Thread-safe.
Connections connections_toward(std::uint16_t port);

/// While it lives: when `deadline` has passed, ends every store call over connections to `port`
/// that were made after this object. Without a port it does nothing.
class StoreDeadline {
 public:
  StoreDeadline(std::optional<std::uint16_t> port, std::chrono::steady_clock::time_point deadline);
  ~StoreDeadline();
  StoreDeadline(const StoreDeadline&) = delete;
  StoreDeadline& operator=(const StoreDeadline&) = delete;

  /// Whether the deadline has passed and calls were ended.
  bool passed() const;

 private:
  void watch(std::uint16_t port, std::chrono::steady_clock::time_point deadline);

  Connections earlier_;
  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  bool passed_ = false;
  std::thread thread_;
};

}  // namespace ddp::detail
