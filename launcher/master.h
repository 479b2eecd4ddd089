#pragma once

#include <cstdint>
#include <string>

#include <launcher/address.h>
#include <launcher/options.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// Where the workers meet: rank 0 serves a store there.
struct Master {
  std::string address;    ///< MASTER_ADDR
  uint16_t port = 0;      ///< MASTER_PORT
  UniqueFd reserved;      ///< the socket that holds the port, see Note [Reserving a port]
  bool loopback = false;  ///< chosen by the launcher: nothing of the job needs another interface
  Address reserved_on;    ///< the address of `reserved`, without its port
};

/// Decides where the workers meet. With a port given, checks that rank 0 can have it (where rank 0
/// will be on this node); on one node without a port, reserves a free one.
/// Throws Error for a host without an address and for a port in use, naming it.
Master choose_master(const Options& options);

/// Reserves a free port on all addresses of this machine, for a round of an elastic job: whoever
/// gets rank 0 is found there by the other nodes. Another one than `used_before`. Returns the
/// socket that holds it. Throws Error.
UniqueFd reserve_port_for_all_nodes(uint16_t* port, uint16_t used_before);

/// Where the workers of the next attempt meet: at a fresh port where the launcher chose it, so that
/// nobody meets what is left of the last attempt. Throws Error.
Master renew_master(Master master);

}  // namespace ddp::launcher
