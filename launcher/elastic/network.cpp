#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include <launcher/elastic/network.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {
namespace {

UniqueFd open_socket(int family, int type) {
  return UniqueFd(::socket(family, type | SOCK_CLOEXEC, 0));
}

}  // namespace

bool is_own_address(Address address) {
  address.set_port(0);
  const UniqueFd fd = open_socket(address.family(), SOCK_STREAM);
  return fd && ::bind(fd.get(), address.get(), address.length) == 0;
}

std::string address_toward(const Address& address) {
  const UniqueFd fd = open_socket(address.family(), SOCK_DGRAM);
  Address own;
  own.length = sizeof(own.storage);
  if (!fd || ::connect(fd.get(), address.get(), address.length) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) != 0) {
    return {};
  }
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes =
      own.family() == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<sockaddr_in6&>(own.storage).sin6_addr)
          : static_cast<const void*>(&reinterpret_cast<sockaddr_in&>(own.storage).sin_addr);
  return ::inet_ntop(own.family(), bytes, text, sizeof(text)) != nullptr ? text : "";
}

bool answers(const Address& address, std::chrono::milliseconds patience) {
  const UniqueFd fd = open_socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK);
  if (!fd) return false;
  if (::connect(fd.get(), address.get(), address.length) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd ready{fd.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

}  // namespace ddp::launcher
