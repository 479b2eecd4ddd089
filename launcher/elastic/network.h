#pragma once

#include <chrono>
#include <string>

#include <launcher/address.h>

namespace ddp::launcher {

/// Whether this machine has the address.
bool is_own_address(Address address);

/// This machine's numeric address on its route to `address`; nothing is sent. Empty where there is
/// no route.
std::string address_toward(const Address& address);

/// Whether somebody listens there, and says so within `patience`.
bool answers(const Address& address, std::chrono::milliseconds patience);

}  // namespace ddp::launcher
