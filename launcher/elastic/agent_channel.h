#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include <launcher/elastic/agent_messages.h>

namespace ddp::launcher {

/// The agent's end of the socket to its launcher, see AgentLink for the other.
class AgentChannel {
 public:
  /// The socket must outlive this object.
  explicit AgentChannel(int socket) : socket_(socket) {}

  void say(const FromAgent& message) const;
  void say(const std::string& text) const;

  /// Takes what the launcher has said, and before waits at most `time` for something if nothing is
  /// there. False once this node is to leave. Throws std::invalid_argument.
  bool listen(std::chrono::milliseconds time);

  /// What was taken and not asked for yet, in order.
  std::optional<ToAgent> next();

  /// How this node leaves: "has left the job (SIGTERM)"; nothing while it does not.
  const std::optional<std::string>& leaving() const { return leaving_; }

  /// The launcher has ended.
  bool gone() const { return gone_; }

  /// Until the node takes part in the job, its end is that of this node alone.
  void set_taking_part() { taking_part_ = true; }

 private:
  int socket_;
  std::deque<ToAgent> messages_;
  std::optional<std::string> leaving_;
  bool gone_ = false;
  bool taking_part_ = false;
};

}  // namespace ddp::launcher
