#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <launcher/elastic/elastic_options.h>
#include <launcher/option_values.h>

namespace ddp::launcher {

/// What the --rdzv_* options and --master_* say together about where the workers meet.
struct Rendezvous {
  bool c10d = false;                             ///< else static
  std::string master_addr;                       ///< empty: not given
  int master_port = 0;                           ///< 0: not given
  std::string run_id;                            ///< empty: not given
  std::optional<std::chrono::seconds> patience;  ///< --rdzv_conf timeout=N
  /// c10d: the endpoint (no host where it was not given) and --rdzv_conf; not the number of nodes.
  ElasticOptions elastic;
};

/// Throws Error with the usage status, also where --rdzv_endpoint and --master_* on the same
/// command line contradict each other.
Rendezvous read_rendezvous(const OptionValues& values);

/// A host with an optional port, "host", "host:1234", "[::1]:1234", "::1".
struct Endpoint {
  std::string host;
  std::string port;  ///< empty: none
};
std::optional<Endpoint> parse_endpoint(std::string_view text);

}  // namespace ddp::launcher
