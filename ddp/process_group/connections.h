#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace ddp::detail {

/// A connected TCP socket of this process. The addresses tell it from a later one that got the same
/// descriptor.
struct Connection {
  int fd = -1;
  std::string local_address;
  std::string peer_address;
  std::uint16_t local_port = 0;
  std::uint16_t peer_port = 0;

  auto operator<=>(const Connection&) const = default;
};

using Connections = std::set<Connection>;

/// All of this process's. Thread-safe.
Connections open_connections();

/// Those of `now` that are not in `earlier`.
Connections opened_since(const Connections& earlier, const Connections& now);

/// How many of them are closed, by either end.
int count_closed(const Connections& connections);

/// Shuts those down that are open still: whoever waits for data on them, here or at the other end,
/// gets the end of the stream. The descriptors stay their owners'.
void shut_down(const Connections& connections);

}  // namespace ddp::detail
