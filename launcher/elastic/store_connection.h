#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <launcher/address.h>
#include <launcher/elastic/agent_channel.h>
#include <launcher/elastic/elastic_options.h>
#include <launcher/elastic/store.h>
#include <launcher/elastic/store_plugin.h>

namespace ddp::launcher {

/// The way to the job's store: serves it where this node is the host, else waits for it and joins.
class StoreConnection {
 public:
  using Clock = std::chrono::steady_clock;

  /// The arguments must outlive this object.
  StoreConnection(const ElasticOptions& options, const StorePlugin& plugin, AgentChannel& channel)
      : options_(options), plugin_(plugin), channel_(channel) {}

  /// False where this node is to leave meanwhile. Throws StoreError, and Error that is for the
  /// user.
  bool open();

  /// Whether this node serves the store.
  bool host() const { return host_; }
  Store& store() const { return *store_; }

  /// Where the other nodes reach this one: the endpoint's host on the host, whatever its own
  /// resolver makes of the name, else this node's address on the route to it. Throws Error.
  std::string own_address() const;

 private:
  std::optional<Address> find_address();
  bool await_host(const Address& address);

  const ElasticOptions& options_;
  const StorePlugin& plugin_;
  AgentChannel& channel_;
  Clock::time_point deadline_;
  Address address_;
  bool host_ = false;
  std::unique_ptr<Store> store_;
};

}  // namespace ddp::launcher
