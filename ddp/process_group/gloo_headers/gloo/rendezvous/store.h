// The interface that ProcessGroupGloo::GlooStore implements: the virtual functions of Gloo's
// rendezvous store in Gloo's order. Only LibTorch's own code calls them.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <gloo/context.h>

#define GLOO_STORE_HAS_STORE_V2

namespace gloo::rendezvous {

class Store {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(30);

  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
  virtual bool has_v2_support() = 0;
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string>& keys) = 0;
  virtual void multi_set(const std::vector<std::string>& keys,
                         const std::vector<std::vector<char>>& values) = 0;
  virtual void append(const std::string& key, const std::vector<char>& value) = 0;
  virtual long add(const std::string& key, long value) = 0;
};

}  // namespace gloo::rendezvous
