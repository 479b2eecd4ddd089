#include <algorithm>
#include <cstdlib>
#include <dirent.h>
#include <iterator>
#include <netinet/in.h>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {
namespace {

std::uint16_t port_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return 0;
}

}  // namespace

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

std::set<int> sockets_toward(std::uint16_t port) {
  std::set<int> found;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* entry = readdir(folder)) {
    char* end = nullptr;
    const auto fd = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (*end == '\0' && getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 &&
        port_of(peer) == port) {
      found.insert(fd);
    }
  }
  closedir(folder);
  return found;
}

void shut_down(const std::set<int>& sockets) {
  for (const int fd : sockets) {
    shutdown(fd, SHUT_RDWR);
  }
}

StoreDeadline::StoreDeadline(std::optional<std::uint16_t> port,
                             std::chrono::steady_clock::time_point deadline) {
  if (port) {
    earlier_ = sockets_toward(*port);
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
    std::set<int> sockets;
    const auto now = sockets_toward(port);
    std::set_difference(now.begin(), now.end(), earlier_.begin(), earlier_.end(),
                        std::inserter(sockets, sockets.end()));
    shut_down(sockets);
  } while (!stopped_.wait_for(lock, std::chrono::milliseconds(50), [this] { return stop_; }));
}

}  // namespace ddp::detail
