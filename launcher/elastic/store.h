#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace ddp::launcher {

/// The store does not answer as it should: it has ended, or cannot be reached. One line.
class StoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Keys and values that the agents of a job share. Not thread-safe. Every function throws
/// StoreError.
class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;

  virtual std::optional<std::string> get(const std::string& key) = 0;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Writes `desired` where the key has `expected` (empty: or is missing). Returns what it has
  /// then.
  virtual std::string compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) = 0;
  /// A counter that begins at 0. Returns what it has then.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  /// Whether there was such a key before the time was over.
  virtual bool wait(const std::string& key, std::chrono::milliseconds time) = 0;
  virtual void erase(const std::string& key) = 0;
};

}  // namespace ddp::launcher
