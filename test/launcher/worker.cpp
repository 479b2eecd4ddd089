// What the launcher's tests start as a worker, where a shell script cannot do it:
//   worker args ...             prints RANK and its own arguments, each in angle brackets
//   worker throw                ends by an exception that nobody catches
//   worker meet adopt|plain|any all ranks meet at MASTER_ADDR:MASTER_PORT, where rank 0 listens on
//   the
//                               inherited socket, on one bound to the address, or to all of them
//   worker sockets [PORT ...]   tells which of these ports' sockets it has inherited

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

int print_arguments(int argc, char** argv) {
  std::string text = variable("RANK") + ":";
  for (int i = 1; i < argc; ++i) text.append(" <").append(argv[i]).append(">");
  text.push_back('\n');
  return ::write(STDOUT_FILENO, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0
                                                                                               : 1;
}

int bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  const bool internet = address.ss_family == AF_INET || address.ss_family == AF_INET6;
  // The port lies at the same place in both families.
  return internet ? ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port) : 0;
}

int listening_socket(const std::string& way, sockaddr_in address) {
  int fd = -1;
  if (way == "adopt") {
    fd = std::atoi(variable("DDP_MASTER_LISTEN_FD").c_str());
    if (bound_port(fd) != ntohs(address.sin_port))
      die("the inherited socket is not bound to MASTER_PORT");
  } else if (way == "any") {
    // As c10d's store does: all interfaces, both families.
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = address.sin_port;
    fd = ::socket(AF_INET6, SOCK_STREAM, 0);
    const int on = 1;
    const int off = 0;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (::bind(fd, reinterpret_cast<sockaddr*>(&any), sizeof(any)) != 0) die("bind to all");
  } else {
    fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) die("bind");
  }
  if (::listen(fd, 128) != 0) die("listen");
  return fd;
}

int meet(const std::string& way) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(variable("MASTER_PORT").c_str())));
  if (::inet_pton(AF_INET, variable("MASTER_ADDR").c_str(), &address.sin_addr) != 1)
    die("MASTER_ADDR");
  // Who meets a rank of another job gets another greeting.
  const std::string greeting = variable("TORCHELASTIC_RUN_ID") + variable("WORLD_SIZE");
  const int world_size = std::atoi(variable("WORLD_SIZE").c_str());
  char text[64] = "";
  if (variable("RANK") == "0") {
    const int listener = listening_socket(way, address);
    for (int peer = 1; peer < world_size; ++peer) {
      const int fd = ::accept(listener, nullptr, nullptr);
      if (fd < 0) die("accept");
      if (::recv(fd, text, greeting.size(), MSG_WAITALL) < 0 || greeting != text) die("a stranger");
      if (::send(fd, "!", 1, 0) != 1) die("send");
      ::close(fd);
    }
    return 0;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      if (::send(fd, greeting.data(), greeting.size(), 0) < 0 || ::recv(fd, text, 1, 0) != 1)
        die("greeting");
      return 0;
    }
    ::close(fd);
    const timespec pause{0, 2000000};
    ::nanosleep(&pause, nullptr);
  }
  die("connect");
}

int print_sockets(int argc, char** argv) {
  std::string text = "rank " + variable("RANK") +
                     " announced=" + (variable("DDP_MASTER_LISTEN_FD").empty() ? "no" : "yes");
  for (int i = 2; i < argc; ++i) {
    const int port = std::strcmp(argv[i], "own") == 0 ? std::atoi(variable("MASTER_PORT").c_str())
                                                      : std::atoi(argv[i]);
    int found = 0;
    for (int fd = 0; fd < 1024; ++fd) found += port != 0 && bound_port(fd) == port ? 1 : 0;
    text.append(" ").append(std::to_string(found));
  }
  text.push_back('\n');
  return ::write(STDOUT_FILENO, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0
                                                                                               : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "throw") throw std::runtime_error("nobody catches this");
  if (what == "meet") return meet(argc > 2 ? argv[2] : "");
  if (what == "sockets") return print_sockets(argc, argv);
  return print_arguments(argc, argv);
}
