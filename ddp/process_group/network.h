#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ddp::detail {

/// "host:port", with brackets around an IPv6 address.
std::string host_and_port(const std::string& host, std::uint16_t port);

/// Resolves `host` to its first numeric address. A name that is not known yet may appear while a
/// cluster starts, so the look-up is repeated for `timeout` (at most a minute).
/// Throws UsageError that names the host.
std::string resolve(const std::string& host, std::chrono::milliseconds timeout);

/// The numeric address that this machine uses on its route to `address` (numeric): what a rank
/// announces, since the machine's own name often resolves to 127.0.1.1 or to nothing.
/// Nothing is sent. Throws UsageError where there is no route.
std::string local_address_toward(const std::string& address, std::uint16_t port);

/// Whether a numeric address is this machine's loopback.
bool is_loopback(const std::string& address);

}  // namespace ddp::detail
