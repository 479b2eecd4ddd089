#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <launcher/address.h>
#include <launcher/error.h>
#include <launcher/master.h>

// Note [Reserving a port]
// A port that is picked, released and then bound by a worker can be taken by somebody else in
// between: jobs that start side by side fail with "address in use". So the launcher holds it: a
// socket bound to the port with SO_REUSEADDR which does not listen. While it exists the kernel
// gives the port to nobody who asks for any free port, and yet a program that binds the same port
// with SO_REUSEADDR (as every TCPStore does) may listen on it. It does not need to know about all
// this, but a program that does can take the socket itself: rank 0 alone inherits it, and finds its
// number in DDP_MASTER_LISTEN_FD. A store on that socket is reachable on loopback only.
// A *listening* socket would not do: then the program's own bind fails with "address in use".

namespace ddp::launcher {
namespace {

constexpr uint16_t kDefaultPort = 29500;
/// A cluster may publish the name of node 0 a little after the job's start.
constexpr std::chrono::seconds kPatience{30};

/// The inherited socket's number is kept out of the way of the small ones that scripts use.
constexpr int kLowestReservedFd = 100;

UniqueFd tcp_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  const int off = 0;
  if (fd) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd && family == AF_INET6)
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  return fd;
}

std::string show(const std::string& host, uint16_t port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

void reserve_free_port(Master& master, Address address) {
  address.set_port(0);
  master.reserved_on = address;
  UniqueFd fd = tcp_socket(address.family());
  Address bound;
  bound.length = sizeof(bound.storage);
  if (!fd || ::bind(fd.get(), address.get(), address.length) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    const int error = errno;
    throw Error(
        ExitStatus::kSetup,
        fmt::format("cannot reserve a port on {}: {}{}", master.address, std::strerror(error),
                    error == EADDRNOTAVAIL ? " (not an address of this machine)" : ""));
  }
  const int high = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, kLowestReservedFd);
  if (high >= 0) fd = UniqueFd(high);
  master.port = bound.port();
  master.reserved = std::move(fd);
}

/// Tries what rank 0's store will do: listen on every interface.
int try_listening(int family, uint16_t port) {
  UniqueFd fd = tcp_socket(family);
  if (!fd) return errno;
  Address any;
  any.storage.ss_family = static_cast<sa_family_t>(family);
  any.length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  any.set_port(port);
  if (::bind(fd.get(), any.get(), any.length) != 0) return errno;
  return ::listen(fd.get(), 1) == 0 ? 0 : errno;
}

void check_port(const Master& master) {
  int error = try_listening(AF_INET6, master.port);
  // No IPv6 on this machine is no reason to refuse.
  if (error != 0 && error != EADDRINUSE) error = try_listening(AF_INET, master.port);
  if (error == 0) return;
  throw Error(
      ExitStatus::kSetup,
      fmt::format(
          "cannot listen on {}: {}{}", show(master.address, master.port),
          error == EADDRINUSE ? "the address is in use by another process" : std::strerror(error),
          error == EADDRINUSE
              ? "\nGive another --master_port, or on one node none at all: a free one is "
                "taken then."
              : ""));
}

}  // namespace

Master choose_master(const Options& options) {
  Master master;
  master.address = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  const bool one_node = options.nnodes == 1;

  Address address = loopback_address();
  if (!options.master_addr.empty()) {
    const auto patience = one_node ? std::chrono::seconds(0) : kPatience;
    address =
        resolve(options.master_addr, "--master_addr", options.resolve_patience.value_or(patience));
  }
  if (one_node && options.master_port == 0) {
    reserve_free_port(master, address);
    master.loopback = options.master_addr.empty();
    return master;
  }
  master.port =
      options.master_port == 0 ? kDefaultPort : static_cast<uint16_t>(options.master_port);
  if (options.node_rank == 0) check_port(master);
  return master;
}

UniqueFd reserve_port_for_all_nodes(uint16_t* port, uint16_t used_before) {
  Master master;
  master.address = "all addresses";
  Address any;
  any.storage.ss_family = AF_INET6;
  any.length = sizeof(sockaddr_in6);
  try {
    reserve_free_port(master, any);
  } catch (const Error&) {
    // No IPv6 on this machine.
    any.storage.ss_family = AF_INET;
    any.length = sizeof(sockaddr_in);
    reserve_free_port(master, any);
  }
  if (master.port == used_before) {
    master = renew_master(std::move(master));
  }
  *port = master.port;
  return std::move(master.reserved);
}

Master renew_master(Master master) {
  if (!master.reserved) return master;
  // Held until there is another: the kernel may give the same one again.
  const UniqueFd before = std::move(master.reserved);
  reserve_free_port(master, master.reserved_on);
  return master;
}

}  // namespace ddp::launcher
