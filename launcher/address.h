#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace ddp::launcher {

/// A socket address with its length.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  uint16_t port() const;
  void set_port(uint16_t port);
};

/// 127.0.0.1, without asking any resolver.
Address loopback_address();

/// Resolves a host name or a numeric address to its first address. A name that is not known is
/// asked for again until `patience` has passed: in clusters it may appear a little after the job.
/// Throws Error that names the host and the option that it was given by.
Address resolve(const std::string& host, const char* option, std::chrono::seconds patience);

}  // namespace ddp::launcher
