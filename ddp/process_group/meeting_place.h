#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace ddp::detail {

/// An `init_method` read and checked, before anything is sent: where the ranks meet, and who this
/// one is.
struct MeetingPlace {
  enum class Kind { kTcp, kFile };
  Kind kind = Kind::kTcp;
  int rank = -1;
  int world_size = -1;
  /// For TCP: the store's numeric address and port.
  std::string host;
  std::uint16_t port = 0;
  /// For a file.
  std::string path;
  /// The numeric address that this rank's connections to the others are bound to.
  std::string own_address;
  /// The place as an error calls it: "127.0.0.1:29500", "head-node:29500", "/shared/meet".
  std::string name;
};

/// Reads `url`: `env://` (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
/// `tcp://host:port?rank=R&world_size=W` or `file:///path?rank=R&world_size=W`, as Python does.
/// `rank` and `world_size` (-1: not given) stand for the address's query.
///
/// Throws UsageError: a malformed address, a missing or malformed variable, a rank out of range, an
/// unknown host (tried for `timeout`), no route to it.
MeetingPlace locate(const std::string& url, int rank, int world_size,
                    std::chrono::milliseconds timeout);

}  // namespace ddp::detail
