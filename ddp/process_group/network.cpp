#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/network.h>

namespace ddp::detail {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList look_up(const std::string& host, const std::string& service, int flags, int* error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  *error = getaddrinfo(host.c_str(), service.empty() ? nullptr : service.c_str(), &hints, &found);
  return {*error == 0 ? found : nullptr, &freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  if (getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text;
}

struct LookUp {
  std::string address;
  std::string error;
};

LookUp first_address(const std::string& host) {
  int error = 0;
  if (const auto found = look_up(host, "", 0, &error)) {
    // IPv4 first, as a name that resolves to both is often listened to on IPv4 only.
    for (const int family : {AF_INET, AF_INET6}) {
      for (const addrinfo* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
        if (entry->ai_family == family) {
          return {numeric(entry->ai_addr, entry->ai_addrlen), {}};
        }
      }
    }
  }
  return {{}, error != 0 ? gai_strerror(error) : "none found"};
}

}  // namespace

std::string host_and_port(const std::string& host, std::uint16_t port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

std::string resolve(const std::string& host, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto patience = std::min<std::chrono::milliseconds>(timeout, std::chrono::minutes(1));
  const auto deadline = Clock::now() + patience;
  for (;;) {
    // A name server that does not answer holds getaddrinfo() for longer than the caller may wait.
    std::promise<LookUp> promise;
    auto result = promise.get_future();
    std::thread([host, promise = std::move(promise)]() mutable {
      promise.set_value(first_address(host));
    }).detach();
    std::string error = "the name service does not answer";
    if (result.wait_until(deadline) == std::future_status::ready) {
      auto found = result.get();
      if (!found.address.empty()) {
        return found.address;
      }
      error = found.error;
    }
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) {
      throw UsageError(fmt::format(
          "the host \"{}\" has no address ({}; tried for {:.1f} s). Check the spelling of "
          "MASTER_ADDR "
          "(`launch --master_addr`) or of the init_method, and the name service, or give a numeric "
          "address.",
          host, error, std::chrono::duration<double>(patience).count()));
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(left, std::chrono::milliseconds(250)));
  }
}

std::string local_address_toward(const std::string& address, std::uint16_t port) {
  int error = 0;
  const auto target = look_up(address, std::to_string(port), AI_NUMERICHOST, &error);
  if (!target) {
    throw UsageError(fmt::format("\"{}\" is not a numeric address", address));
  }
  // Connecting a datagram socket chooses a route and a local address, and sends nothing.
  const int fd = socket(target->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage local{};
  socklen_t length = sizeof(local);
  int failure = 0;
  if (fd < 0 || connect(fd, target->ai_addr, target->ai_addrlen) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0) {
    failure = errno;
  }
  if (fd >= 0) {
    close(fd);
  }
  if (failure != 0) {
    throw UsageError(
        fmt::format("this machine has no route to the master {} ({}). Check MASTER_ADDR (`launch "
                    "--master_addr`) and "
                    "this machine's network.",
                    host_and_port(address, port), std::strerror(failure)));
  }
  return numeric(reinterpret_cast<const sockaddr*>(&local), length);
}

bool is_loopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1";
}

}  // namespace ddp::detail
