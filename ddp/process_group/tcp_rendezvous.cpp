#include <algorithm>
#include <fcntl.h>
#include <future>
#include <limits>
#include <netinet/in.h>
#include <optional>
#include <sys/socket.h>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/store_sockets.h>
#include <ddp/process_group/tcp_rendezvous.h>

// Note [Who is there]
// c10d's store counts the ranks that joined, and rank 0 waits for the count; nobody knows *who* is
// missing, and the others learn of a missing rank only when Gloo gives up. So C++ ranks say more,
// under "ddp/" on the store:
//   ddp/generation  rank 0's count of earlier groups, there from the first moment: rank 0 is a C++
//                   rank, and this is not the store of a group that is being destroyed;
//   ddp/joined/R    how many processes came as rank R;
//   ddp/start       rank 0's word: "go", or why it gave up, which the others throw too;
//   ddp/heard/R     rank R has read that; rank 0 closes the store when all who joined have.
// A rank 0 in Python says none of this, and is not waited for.

namespace ddp::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kGeneration = "ddp/generation";
constexpr const char* kStart = "ddp/start";
constexpr const char* kGo = "go";
constexpr milliseconds kPythonMaster(500);
constexpr milliseconds kHearing(300);

// The launcher's announcement of the port that it reserved: a bound socket that is not listening.
constexpr const char* kReservedSocket = "DDP_MASTER_LISTEN_FD";

double seconds(milliseconds duration) { return std::chrono::duration<double>(duration).count(); }

milliseconds left_until(Clock::time_point deadline) {
  return std::max(milliseconds(1),
                  std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

void put(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, value);
}

std::string take(c10d::Store& store, const std::string& key) {
  const auto value = store.get(key);
  return {value.begin(), value.end()};
}

std::string joined_key(int rank) { return fmt::format("ddp/joined/{}", rank); }
std::string heard_key(int rank) { return fmt::format("ddp/heard/{}", rank); }

/// The ranks that are not there, as far as C++ ranks tell: "rank 1", "ranks 1, 2".
std::string missing_ranks(c10d::Store& store, int world_size) {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!store.check({joined_key(rank)})) {
      missing.push_back(rank);
    }
  }
  return missing.empty()
             ? "a rank"
             : fmt::format("rank{} {}", missing.size() > 1 ? "s" : "", fmt::join(missing, ", "));
}

std::string not_come(c10d::Store& store, const MeetingPlace& place, milliseconds timeout) {
  return fmt::format(
      "{} of {} did not come to the store at {} within {:.1f} s. Look into the logs of what is "
      "missing, and "
      "check that every rank was started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE "
      "(`launch "
      "--nnodes --master_addr --master_port`)",
      missing_ranks(store, place.world_size), place.world_size, place.name, seconds(timeout));
}

void say_joined(c10d::Store& store, const MeetingPlace& place) {
  if (store.add(joined_key(place.rank), 1) > 1) {
    throw UsageError(
        fmt::format("rank {0}: another process has joined the store at {1} as rank {0}: every "
                    "process needs a RANK of its own, "
                    "and every job a MASTER_PORT of its own",
                    place.rank, place.name));
  }
}

/// The launcher's reserved socket for `port`, if this process inherited it.
std::optional<int> reserved_socket(std::uint16_t port) {
  const auto text = environment(kReservedSocket);
  if (!text) {
    return std::nullopt;
  }
  const auto number = parse_integer(*text);
  if (!number || *number < 0 || *number > std::numeric_limits<int>::max()) {
    throw UsageError(
        fmt::format("the environment variable {} is \"{}\"; expected the number of a socket that "
                    "the launcher has opened for rank 0. `launch` sets it; do not set it yourself.",
                    kReservedSocket, *text));
  }
  const auto fd = static_cast<int>(*number);
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return std::nullopt;
  }
  const auto bound = address.ss_family == AF_INET6
                         ? ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port)
                         : ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
  length = sizeof(address);
  const bool connected = getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  int listening = 0;
  socklen_t size = sizeof(listening);
  if (bound != port || connected ||
      getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening != 0) {
    return std::nullopt;
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

/// Puts a reserved socket back after use. The launcher holds it too, so closing it here would leave
/// it listening with nobody to accept: the next store would find its port taken, and clients would
/// connect to nobody. Shut down, it no longer listens; a port that the kernel had chosen is gone
/// then too, and bound anew.
class Reservation {
 public:
  explicit Reservation(std::optional<int> fd) : fd_(fd) {
    if (fd_) {
      getsockname(*fd_, reinterpret_cast<sockaddr*>(&address_), &length_);
    }
  }
  ~Reservation() {
    if (fd_) {
      shutdown(*fd_, SHUT_RDWR);
      // Fails where the port is bound still, which is as good.
      (void)bind(*fd_, reinterpret_cast<const sockaddr*>(&address_), length_);
    }
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  std::optional<int> copy() const {
    return fd_ ? std::optional(fcntl(*fd_, F_DUPFD_CLOEXEC, 0)) : std::nullopt;
  }

 private:
  std::optional<int> fd_;
  sockaddr_storage address_{};
  socklen_t length_ = sizeof(address_);
};

c10d::TCPStoreOptions serving(c10d::TCPStoreOptions options, std::optional<int> listen_fd) {
  options.isServer = true;
  options.masterListenFd = listen_fd;
  return options;
}

/// The store that this process serves. The reservation is the first base, as it must outlive the
/// server.
class ServedStore final : private Reservation, public c10d::TCPStore {
 public:
  ServedStore(const std::string& host, const c10d::TCPStoreOptions& options,
              std::optional<int> reserved)
      : Reservation(reserved), TCPStore(host, serving(options, copy())) {}
};

c10d::TCPStoreOptions store_options(const MeetingPlace& place, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = place.port;
  options.numWorkers = place.world_size;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

c10::intrusive_ptr<c10d::TCPStore> open_store(const MeetingPlace& place, milliseconds timeout) {
  try {
    return c10::make_intrusive<ServedStore>(place.host, store_options(place, timeout),
                                            reserved_socket(place.port));
  } catch (const std::exception& error) {
    const auto text = concise(error);
    if (text.find("EADDRINUSE") != std::string::npos || text.find("in use") != std::string::npos) {
      throw UsageError(
          fmt::format("rank {}: the store's port is taken: {} is already in use by another "
                      "process. Choose another one with "
                      "`launch --master_port` (MASTER_PORT), or leave it out on a single node: a "
                      "free one is then taken.",
                      place.rank, place.name));
    }
    throw UsageError(
        fmt::format("rank {}: cannot serve the store at {} ({}). Rank 0 runs on the machine whose "
                    "address MASTER_ADDR is.",
                    place.rank, place.name, text));
  }
}

TcpMeeting serve(const MeetingPlace& place, std::uint64_t generation, milliseconds timeout,
                 Clock::time_point deadline) {
  const auto earlier = connections_toward(place.port);
  const auto store = open_store(place, left_until(deadline));
  const auto waiting_over = opened_since(earlier, connections_toward(place.port));
  const auto client = store->clone();
  put(*client, kGeneration, std::to_string(generation));
  say_joined(*client, place);
  // c10d ends its wait by whole seconds, and only with the socket.
  auto waiting = std::async(std::launch::async, [store] { store->waitForWorkers(); });
  std::string why;
  if (waiting.wait_until(deadline) != std::future_status::ready) {
    why = not_come(*client, place, timeout);
    shut_down(waiting_over);
  }
  try {
    waiting.get();
  } catch (const std::exception&) {
    why = why.empty() ? not_come(*client, place, timeout) : why;
  }
  if (why.empty()) {
    put(*client, kStart, kGo);
    return {client, store, false};
  }
  put(*client, kStart, why);
  const auto heard_by = Clock::now() + kHearing;
  for (int rank = 1; rank < place.world_size; ++rank) {
    try {
      if (client->check({joined_key(rank)})) {
        client->wait({heard_key(rank)}, left_until(heard_by));
      }
    } catch (const std::exception&) {
      // It ends when the store closes.
    }
  }
  throw CommunicationError(fmt::format("rank {}: {}.", place.rank, why));
}

c10::intrusive_ptr<c10d::TCPStore> join(const MeetingPlace& place, milliseconds timeout,
                                        Clock::time_point deadline) {
  try {
    return c10::make_intrusive<c10d::TCPStore>(place.host,
                                               store_options(place, left_until(deadline)));
  } catch (const std::exception& error) {
    throw CommunicationError(
        fmt::format("rank {}: rank 0's store at {} could not be joined within {:.1f} s ({}). Check "
                    "that rank 0 has started, that "
                    "MASTER_ADDR and MASTER_PORT are the same on every rank, and that no firewall "
                    "or other program has that port.",
                    place.rank, place.name, seconds(timeout), concise(error)));
  }
}

enum class Master { kPython, kFresh, kLeaving };

/// Whose store this is. Throws what the store throws.
Master recognise(c10d::Store& store, std::uint64_t generation, milliseconds patience) {
  const auto until = Clock::now() + std::min(patience, kPythonMaster);
  while (!store.check({kGeneration})) {
    if (Clock::now() >= until) {
      return Master::kPython;
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
  const auto number = parse_integer(take(store, kGeneration)).value_or(0);
  if (number < static_cast<std::int64_t>(generation)) {
    return Master::kLeaving;
  }
  return store.check({kStart}) && take(store, kStart) != kGo ? Master::kLeaving : Master::kFresh;
}

/// Rank 0's word that all have come.
void await_start(c10d::Store& store, const MeetingPlace& place, milliseconds timeout,
                 Clock::time_point deadline) {
  std::string word;
  try {
    store.wait({kStart}, left_until(deadline));
    word = take(store, kStart);
  } catch (const c10::DistNetworkError&) {
    throw CommunicationError(
        fmt::format("rank {}: rank 0 has ended, or does not answer, at its store at {} before all "
                    "ranks came: see its log",
                    place.rank, place.name));
  } catch (const std::exception&) {
    throw CommunicationError(
        fmt::format("rank {}: {}.", place.rank, not_come(store, place, timeout)));
  }
  if (word != kGo) {
    put(store, heard_key(place.rank), "1");
    store.check({heard_key(place.rank)});
    throw CommunicationError(fmt::format("rank {}: rank 0 gave up: {}.", place.rank, word));
  }
}

}  // namespace

TcpMeeting meet_over_tcp(const MeetingPlace& place, std::uint64_t generation, milliseconds timeout,
                         Clock::time_point deadline) {
  if (environment("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    // The launcher that set this serves the store itself, and every rank is a client.
    return {join(place, timeout, deadline), nullptr, /*outlives_group=*/true};
  }
  if (place.rank == 0) {
    return serve(place, generation, timeout, deadline);
  }
  for (;;) {
    const auto store = join(place, timeout, deadline);
    auto master = Master::kLeaving;
    try {
      master = recognise(*store, generation, left_until(deadline));
      if (master != Master::kLeaving) {
        say_joined(*store, place);
        store->waitForWorkers();  // counts this rank, and does not wait
      }
    } catch (const c10::Error&) {
      // The old store closed in between.
      master = Master::kLeaving;
    }
    if (master == Master::kFresh) {
      await_start(*store, place, timeout, deadline);
    }
    if (master != Master::kLeaving) {
      return {store, nullptr, false};
    }
    if (Clock::now() >= deadline) {
      throw CommunicationError(
          fmt::format("rank {}: rank 0 has not opened its store at {} anew within {:.1f} s: every "
                      "rank must call "
                      "init_process_group() again",
                      place.rank, place.name, seconds(timeout)));
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
}

}  // namespace ddp::detail
