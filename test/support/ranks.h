#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ddp::test {

/// How one rank of `run_ranks` ended.
struct RankResult {
  /// What the body put in with `report`.
  std::map<std::string, std::string> values;
  /// The exception that left the body: "UsageError", "CommunicationError", "Error", "exception", or
  /// "" where none did; and its text.
  std::string error_type;
  std::string error;
  /// Exit status, or 128 + signal. Still running at the time limit: -1 (it was then killed).
  int status = 0;
  /// From the start of the run to the end of this rank.
  double seconds = 0;
  /// From the start of the run to the arrival of each value, the latest of its name.
  std::map<std::string, double> arrived;

  const std::string& operator[](const std::string& name) const;
};

/// One rank's side of a `run_ranks`.
class Rank {
 public:
  Rank(int rank, int world_size, int pipe) : rank_(rank), world_size_(world_size), pipe_(pipe) {}

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Hands a value to the test; it arrives even if the rank is killed afterwards.
  void report(const std::string& name, const std::string& value) const;
  /// The bytes of a number or of any trivially copyable value, for bit-exact comparison.
  template <class Value>
  void report(const std::string& name, Value value) const requires std::is_arithmetic_v<Value> {
    report(name, std::to_string(value));
  }

 private:
  int rank_;
  int world_size_;
  int pipe_;
};

struct RankOptions {
  /// The run's end at the latest: what still runs is killed, and has status -1.
  std::chrono::seconds limit{60};
  /// Set on every rank, beside RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
  /// MASTER_PORT; an empty value unsets.
  std::map<std::string, std::string> environment;
  /// Reserve the master's port as the launcher does and let rank 0 adopt it.
  bool reserve_port = true;
};
inline RankOptions within(int seconds) {
  RankOptions options;
  options.limit = std::chrono::seconds(seconds);
  return options;
}

/// Runs `body` in `world_size` forked processes, each with an environment as the launcher gives it,
/// and one thread for LibTorch. The test's own process must not have used LibTorch's thread pools.
/// A body that returns ends its process with status 0; one that throws, with status 1.
std::vector<RankResult> run_ranks(int world_size, const std::function<void(const Rank&)>& body,
                                  const RankOptions& options = {});

/// Calls `act` in the test, with the rank's process, once the rank has reported `name`.
/// (For signals sent at a known place of a rank's program.)
struct Trigger {
  int rank;
  std::string name;
  std::function<void(int pid)> act;
};
std::vector<RankResult> run_ranks(int world_size, const std::function<void(const Rank&)>& body,
                                  const RankOptions& options, const std::vector<Trigger>& triggers);

/// A port that no other process is given while this object lives: bound, not listening.
class ReservedPort {
 public:
  ReservedPort();
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;
  int port() const { return port_; }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
  int port_ = 0;
};

/// Inside a rank: ends the rank with an error that quotes the expression unless it holds.
#define RANK_CHECK(expression)                                 \
  do {                                                         \
    if (!(expression)) {                                       \
      ::ddp::test::fail_rank(__FILE__, __LINE__, #expression); \
    }                                                          \
  } while (false)
[[noreturn]] void fail_rank(const char* file, int line, const char* expression);

/// The backend that the tests' groups take: DDP_TEST_BACKEND, or "gloo". CTest runs the test
/// programs of process groups over each.
std::string backend();

/// For a failed CHECK: what every rank said.
std::string summary(const std::vector<RankResult>& results);

}  // namespace ddp::test
