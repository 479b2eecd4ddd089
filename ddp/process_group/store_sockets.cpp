
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {
std::optional<std::uint16_t> tcp_port_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10d::Store* innermost = store.get();
  c10::intrusive_ptr<c10d::Store> keep;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    keep = prefixed->getUnderlyingNonPrefixStore();
    innermost = keep.get();
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(innermost);
  return tcp != nullptr ? std::optional(tcp->getPort()) : std::nullopt;
}

Connections connections_toward(std::uint16_t port) {
  auto found = open_connections();
  std::erase_if(found, [port](const Connection& one) { return one.peer_port != port; });
  return found;
}

StoreDeadline::StoreDeadline(std::optional<std::uint16_t> port,
                             std::chrono::steady_clock::time_point deadline) {
  if (port) {
    earlier_ = connections_toward(*port);
    thread_ = std::thread([this, port = *port, deadline] { watch(port, deadline); });
  }
}

StoreDeadline::~StoreDeadline() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

bool StoreDeadline::passed() const {
  const std::lock_guard lock(mutex_);
  return passed_;
}

void StoreDeadline::watch(std::uint16_t port, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (stopped_.wait_until(lock, deadline, [this] { return stop_; })) {
    return;
  }
  passed_ = true;
  // Again and again: the client connects anew for a while.
  do {
    shut_down(opened_since(earlier_, connections_toward(port)));
  } while (!stopped_.wait_for(lock, std::chrono::milliseconds(50), [this] { return stop_; }));
}

}  // namespace ddp::detail
