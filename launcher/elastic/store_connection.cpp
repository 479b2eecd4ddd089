#include <poll.h>

#include <fmt/format.h>

#include <launcher/elastic/call_limit.h>
#include <launcher/elastic/network.h>
#include <launcher/elastic/store_connection.h>
#include <launcher/error.h>

namespace ddp::launcher {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetry{50};
constexpr milliseconds kAnswer{200};
constexpr milliseconds kSayAfter{5000};

void pause() { ::poll(nullptr, 0, static_cast<int>(kRetry.count())); }

[[noreturn]] void give_up(const std::string& text) { throw Error(ExitStatus::kSetup, text); }

}  // namespace

bool StoreConnection::open() {
  deadline_ = Clock::now() + options_.join_timeout;
  const auto address = find_address();
  if (!address) return false;
  address_ = *address;
  if (options_.is_host.value_or(is_own_address(address_))) {
    const CallLimit limit(options_.read_timeout);
    store_ = plugin_.serve(options_.port, options_.read_timeout);
    host_ = store_ != nullptr;
    if (!host_ && options_.is_host.has_value()) {
      give_up(fmt::format(
          "cannot serve the rendezvous at {}: the port is in use by another process\nGive another "
          "port in --rdzv_endpoint, on all nodes.",
          options_.endpoint()));
    }
  }
  if (host_) return true;
  if (!await_host(address_)) return false;
  const CallLimit limit(options_.read_timeout);
  store_ = plugin_.join(options_.host, options_.port, options_.read_timeout);
  return true;
}

std::string StoreConnection::own_address() const {
  const std::string own = host_ ? options_.host : address_toward(address_);
  if (own.empty()) {
    give_up(fmt::format("this machine has no route to {}: give its own address with --local_addr",
                        options_.endpoint()));
  }
  return own;
}

/// A name may get its address a little after the job has begun.
std::optional<Address> StoreConnection::find_address() {
  bool said = false;
  for (; channel_.listen(milliseconds(0)); pause()) {
    try {
      Address address = resolve(options_.host, "--rdzv_endpoint", std::chrono::seconds(0));
      address.set_port(options_.port);
      return address;
    } catch (const Error&) {
      if (Clock::now() >= deadline_) throw;
    }
    if (!said)
      channel_.say(fmt::format("the host '{}' has no address yet: asking again", options_.host));
    said = true;
  }
  return {};
}

/// The host may start later than this node.
bool StoreConnection::await_host(const Address& address) {
  const auto say_at = Clock::now() + kSayAfter;
  bool said = false;
  while (!answers(address, kAnswer)) {
    if (Clock::now() >= deadline_) {
      give_up(fmt::format(
          "nobody serves the rendezvous at {} within {:g} s (--rdzv_conf join_timeout)\nOn the "
          "node "
          "that has the endpoint's address a launcher serves it; where that node does not know "
          "itself by this name, give it --rdzv_conf is_host=1.",
          options_.endpoint(), std::chrono::duration<double>(options_.join_timeout).count()));
    }
    if (!said && Clock::now() >= say_at) {
      channel_.say(fmt::format("waiting for the node that serves the rendezvous at {}",
                               options_.endpoint()));
      said = true;
    }
    channel_.listen(milliseconds(0));
    if (channel_.leaving()) return false;
    pause();
  }
  return channel_.listen(milliseconds(0));
}

}  // namespace ddp::launcher
