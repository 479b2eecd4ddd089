#include <algorithm>
#include <cstdlib>
#include <dirent.h>
#include <iterator>
#include <netdb.h>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <sys/socket.h>

#include <ddp/process_group/connections.h>

namespace ddp::detail {
namespace {

using Look = int (*)(int, sockaddr*, socklen_t*);

bool read_end(int fd, Look look, std::string* address, std::uint16_t* port) {
  sockaddr_storage end{};
  socklen_t length = sizeof(end);
  if (look(fd, reinterpret_cast<sockaddr*>(&end), &length) != 0) {
    return false;
  }
  if (end.ss_family == AF_INET) {
    *port = ntohs(reinterpret_cast<const sockaddr_in&>(end).sin_port);
  } else if (end.ss_family == AF_INET6) {
    *port = ntohs(reinterpret_cast<const sockaddr_in6&>(end).sin6_port);
  } else {
    return false;
  }
  address->assign(reinterpret_cast<const char*>(&end), length);
  return true;
}

std::optional<Connection> connection(int fd) {
  Connection found;
  found.fd = fd;
  if (!read_end(fd, &getsockname, &found.local_address, &found.local_port) ||
      !read_end(fd, &getpeername, &found.peer_address, &found.peer_port)) {
    return std::nullopt;
  }
  return found;
}

}  // namespace

Connections open_connections() {
  Connections found;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* entry = readdir(folder)) {
    char* end = nullptr;
    const auto fd = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    if (*end != '\0') {
      continue;
    }
    if (auto one = connection(fd)) {
      found.insert(std::move(*one));
    }
  }
  closedir(folder);
  return found;
}

Connections opened_since(const Connections& earlier, const Connections& now) {
  Connections opened;
  std::set_difference(now.begin(), now.end(), earlier.begin(), earlier.end(),
                      std::inserter(opened, opened.end()));
  return opened;
}

int count_closed(const Connections& connections) {
  int closed = 0;
  for (const auto& one : connections) {
    pollfd polled{one.fd, POLLRDHUP, 0};
    const bool is_open = connection(one.fd) == one && poll(&polled, 1, 0) == 0;
    closed += is_open ? 0 : 1;
  }
  return closed;
}

void shut_down(const Connections& connections) {
  for (const auto& one : connections) {
    if (connection(one.fd) == one) {
      shutdown(one.fd, SHUT_RDWR);
    }
  }
}

}  // namespace ddp::detail
