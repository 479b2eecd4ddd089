#include <ddp/process_group/rendezvous.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/error_text.h>
#include <ddp/process_group/network.h>
#include <ddp/process_group/url.h>

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Python's prefix for a store that came from an address (distributed_c10d.py).
constexpr const char* kPrefix = "default_pg";
// The launcher's announcement of the port that it reserved: a bound socket that is not listening.
constexpr const char* kReservedSocket = "DDP_MASTER_LISTEN_FD";

double seconds(milliseconds duration) { return std::chrono::duration<double>(duration).count(); }

int in_range(const std::string& what, std::int64_t value, std::int64_t minimum, std::int64_t maximum) {
  if (value < minimum || value > maximum) {
    throw UsageError(fmt::format("{} is {}; expected a whole number from {} to {}", what, value, minimum, maximum));
  }
  return static_cast<int>(value);
}

/// Rank and world size from the arguments or the address's query, each from exactly one of them.
void read_identity(const Url& url, int rank, int world_size, Rendezvous* meeting) {
  const auto pick = [&](const char* name, int argument) -> std::int64_t {
    const auto entry = url.query.find(name);
    if (entry == url.query.end()) {
      if (argument < 0) {
        throw UsageError(fmt::format(
            "the init_method \"{0}\" needs {1}: give InitProcessGroupOptions().{1}(...), or ?{1}=... in the address",
            url.text, name));
      }
      return argument;
    }
    if (argument >= 0) {
      throw UsageError(fmt::format("{} is given twice: {} in the options and {} in the init_method \"{}\"", name,
                                   argument, entry->second, url.text));
    }
    const auto number = parse_integer(entry->second);
    if (!number) {
      throw UsageError(fmt::format("the init_method \"{}\" has {}={}, which is not a number", url.text, name,
                                   entry->second));
    }
    return *number;
  };
  meeting->world_size = in_range("world_size", pick("world_size", world_size), 1, 1 << 20);
  meeting->rank = in_range("rank", pick("rank", rank), 0, meeting->world_size - 1);
}

/// The launcher's reserved socket, if this process inherited it for `port` and has not used it yet.
std::optional<int> reserved_socket(std::uint16_t port) {
  const auto fd = environment_integer(kReservedSocket, -1, 1 << 20, -1);
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  int listening = 0;
  socklen_t size = sizeof(listening);
  if (fd < 0 || getsockname(static_cast<int>(fd), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getsockopt(static_cast<int>(fd), SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening != 0) {
    return std::nullopt;
  }
  const auto bound = address.ss_family == AF_INET6
                         ? ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port)
                         : ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  if (bound != port) {
    return std::nullopt;
  }
  fcntl(static_cast<int>(fd), F_SETFD, FD_CLOEXEC);
  return static_cast<int>(fd);
}

/// Waits at the store that this rank serves until all ranks have joined it.
void await_all(c10d::TCPStore& store, const std::string& where, int rank, int world_size, milliseconds timeout) {
  try {
    store.waitForWorkers();
  } catch (const std::exception& error) {
    throw CommunicationError(fmt::format(
        "rank {}: not all of the {} ranks joined the store at {} within {:.1f} s ({}). Check that every node's "
        "launcher was started with the same --nnodes, --master_addr and --master_port, and the logs of the missing "
        "ranks.",
        rank, world_size, where, seconds(timeout), concise(error)));
  }
}

c10::intrusive_ptr<c10d::TCPStore> serve(const std::string& host, std::uint16_t port, int rank, int world_size,
                                         milliseconds timeout) {
  const auto where = host_and_port(host, port);
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = true;
  options.numWorkers = world_size;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.multiTenant = true;
  options.masterListenFd = reserved_socket(port);
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    const auto text = concise(error);
    if (text.find("EADDRINUSE") != std::string::npos || text.find("in use") != std::string::npos) {
      throw UsageError(fmt::format(
          "rank {}: the store's port is taken: {} is already in use by another process. Choose another one with "
          "`launch --master_port`, or leave it out on a single node: a free one is then taken.",
          rank, where));
    }
    throw UsageError(fmt::format(
        "rank {}: cannot serve the store at {} ({}). Rank 0 runs on the machine whose address MASTER_ADDR is.", rank,
        where, text));
  }
}

c10::intrusive_ptr<c10d::TCPStore> join(const std::string& address, std::uint16_t port, int rank, int world_size,
                                        milliseconds timeout) {
  const auto where = host_and_port(address, port);
  c10d::TCPStoreOptions options;
  options.port = port;
  options.numWorkers = world_size;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const std::exception& error) {
    throw CommunicationError(fmt::format(
        "rank {}: rank 0's store at {} could not be joined within {:.1f} s ({}). Check that rank 0 has started, that "
        "MASTER_ADDR and MASTER_PORT are the same on every rank, and that no firewall or other program has that port.",
        rank, where, seconds(timeout), concise(error)));
  }
}

void meet_over_tcp(const std::string& host, std::uint16_t port, std::uint64_t generation, milliseconds timeout,
                   Rendezvous* meeting) {
  const auto deadline = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
  };
  const auto address = resolve(host, timeout);
  const auto generation_key = std::string("ddp/generation");
  const auto generation_value = std::to_string(generation);
  meeting->serves_store = meeting->rank == 0;
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (meeting->serves_store) {
    store = serve(address, port, meeting->rank, meeting->world_size, left());
    store->set(generation_key, {generation_value.begin(), generation_value.end()});
    await_all(*store, host_and_port(host, port), meeting->rank, meeting->world_size, left());
  } else {
    for (;;) {
      store = join(address, port, meeting->rank, meeting->world_size, left());
      if (generation == 0) {
        break;
      }
      try {
        store->wait({generation_key}, left());
        const auto value = store->get(generation_key);
        if (std::string(value.begin(), value.end()) == generation_value) {
          break;
        }
      } catch (const std::exception&) {
        // The old store closed in between.
      }
      if (Clock::now() >= deadline) {
        throw CommunicationError(fmt::format(
            "rank {}: rank 0 has not opened its store at {} anew within {:.1f} s: every rank must call "
            "init_process_group() again",
            meeting->rank, host_and_port(host, port), seconds(timeout)));
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    store->waitForWorkers();
  }
  // All ranks on one node: nothing needs to leave the machine.
  const auto local_world_size = environment_integer("LOCAL_WORLD_SIZE", 1, 1 << 20, 0);
  if (is_loopback(address)) {
    meeting->address = address;
  } else if (local_world_size == meeting->world_size) {
    meeting->address = "127.0.0.1";
  } else {
    meeting->address = local_address_toward(address, port);
  }
  meeting->store = c10::make_intrusive<c10d::PrefixStore>(kPrefix, store);
}

}  // namespace

Rendezvous rendezvous(const std::string& text, int rank, int world_size, std::uint64_t generation,
                      milliseconds timeout) {
  const auto url = parse_url(text);
  Rendezvous meeting;
  if (url.scheme == "env") {
    const auto size = url.query.count("world_size") != 0 || world_size >= 0
                          ? -1
                          : required_environment_integer("WORLD_SIZE", 1, 1 << 20);
    const auto own = url.query.count("rank") != 0 || rank >= 0
                         ? -1
                         : required_environment_integer("RANK", 0, size < 0 ? (1 << 20) : size - 1);
    read_identity(url, own < 0 ? rank : static_cast<int>(own), size < 0 ? world_size : static_cast<int>(size),
                  &meeting);
    const auto host = required_environment("MASTER_ADDR");
    const auto port = required_environment_integer("MASTER_PORT", 1, 65535);
    meet_over_tcp(host, static_cast<std::uint16_t>(port), generation, timeout, &meeting);
    return meeting;
  }
  read_identity(url, rank, world_size, &meeting);
  if (url.scheme == "tcp") {
    meet_over_tcp(url.host, *url.port, generation, timeout, &meeting);
    return meeting;
  }
  // Ranks that share a file may sit on several machines; without a master's address, the interface
  // is the user's to name (GLOO_SOCKET_IFNAME).
  meeting.address = "127.0.0.1";
  try {
    meeting.store = c10::make_intrusive<c10d::PrefixStore>(
        kPrefix, c10::make_intrusive<c10d::FileStore>(url.path, meeting.world_size));
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("rank {}: the file {} cannot be used as a store ({})", meeting.rank, url.path,
                                 concise(error)));
  }
  meeting.store->setTimeout(timeout);
  return meeting;
}

}  // namespace ddp::detail
