#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <time.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include <launcher/address.h>
#include <launcher/error.h>
#include <launcher/message.h>

namespace ddp::launcher {

uint16_t Address::port() const {
  // The port lies at the same place in both families.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

void Address::set_port(uint16_t port) {
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
}

Address loopback_address() {
  Address address;
  auto* inet = reinterpret_cast<sockaddr_in*>(&address.storage);
  inet->sin_family = AF_INET;
  inet->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.length = sizeof(sockaddr_in);
  return address;
}

Address resolve(const std::string& host, const char* option, std::chrono::seconds patience) {
  // A numeric address needs no resolver, and must not depend on one.
  Address address;
  auto* inet = reinterpret_cast<sockaddr_in*>(&address.storage);
  if (::inet_pton(AF_INET, host.c_str(), &inet->sin_addr) == 1) {
    inet->sin_family = AF_INET;
    address.length = sizeof(sockaddr_in);
    return address;
  }

  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  bool announced = false;
  while (true) {
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (error == 0) {
      const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
      std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
      address.length = found->ai_addrlen;
      return address;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      throw Error(
          ExitStatus::kSetup,
          fmt::format("the host '{}' ({}) has no address: {}\nCheck the name, or give a numeric "
                      "address.",
                      host, option,
                      error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error)));
    }
    if (!announced) {
      print_message(fmt::format("the host '{}' has no address yet; asking again for {} s", host,
                                patience.count()));
      announced = true;
    }
    const timespec second{1, 0};
    ::nanosleep(&second, nullptr);
  }
}

}  // namespace ddp::launcher
