// Declares what ProcessGroupGloo.hpp and gloo_backend.cpp use of Gloo's context. The class lives
// in LibTorch; nothing here creates, copies or measures one.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};

namespace transport {
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace transport

}  // namespace gloo
