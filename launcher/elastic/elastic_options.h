#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace ddp::launcher {

/// How the launchers of an elastic job find each other, from --nnodes, --rdzv_endpoint and
/// --rdzv_conf.
struct ElasticOptions {
  using Time = std::chrono::milliseconds;

  int least = 1;  ///< nodes
  int most = 1;
  std::string host;  ///< the endpoint
  uint16_t port = 29400;
  std::optional<bool> is_host;  ///< not given: whoever has the endpoint's address

  Time join_timeout{600000};
  Time last_call_timeout{30000};
  Time close_timeout{30000};
  Time keep_alive_interval{5000};
  int keep_alive_max_attempt = 3;
  Time read_timeout{60000};

  /// "10.0.0.1:29400".
  std::string endpoint() const;
};

}  // namespace ddp::launcher
