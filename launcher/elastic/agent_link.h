#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <launcher/elastic/agent_messages.h>
#include <launcher/event_loop.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// The guardian's end of the socket to its agent (see Note [Agent]): says what happens here, and
/// keeps what the agent said last. Never waits.
class AgentLink {
 public:
  struct Round {
    Placement placement;
    int number;
    int restarts;
    std::string address;  ///< of rank 0's node
    int port;
  };
  struct End {
    int status;
    std::string text;
    bool lost;  ///< it is not the job that is over: this node has lost it
  };

  /// `loop` then tells of EventTag::Source::kAgent. It must outlive this object.
  AgentLink(UniqueFd socket, EventLoop& loop);

  /// Takes what the agent has said. Returns what is to be shown.
  std::vector<std::string> handle();

  /// This node has no workers; `port` is reserved for the next round, which is awaited from now on.
  void join(uint16_t port);
  void report_done();
  void report_failure(const WorkerFailure& failure, bool final);
  /// The job ends for all.
  void close(int status, const std::string& why);
  /// This node leaves; `how`: "has left the job (SIGTERM)".
  void leave(const std::string& how);

  /// The round that this node is in, from its beginning until join().
  const std::optional<Round>& round() const { return round_; }
  /// Why the round is over.
  const std::optional<std::string>& restart() const { return restart_; }
  /// Why there will be none any more.
  const std::optional<End>& end() const { return end_; }
  /// Whether this node serves the store.
  bool host() const { return host_; }
  /// The agent has ended: all that was told it has arrived, or never will.
  bool gone() const { return !socket_; }

 private:
  void tell(const ToAgent& message);
  void take(FromAgent message, std::vector<std::string>& said);
  void lose(const std::string& text);

  UniqueFd socket_;
  EventLoop& loop_;
  bool host_ = false;
  std::optional<Round> round_;
  std::optional<std::string> restart_;
  std::optional<End> end_;
};

}  // namespace ddp::launcher
