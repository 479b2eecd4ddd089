#pragma once

#include <optional>
#include <string>

#include <launcher/elastic/job_state.h>
#include <launcher/placement.h>

namespace ddp::launcher {

/// What the launcher tells its agent. Which fields count depends on the kind.
struct ToAgent {
  enum class Kind {
    kJoin,    ///< there are no workers; `port` is reserved for the next round
    kDone,    ///< all workers of `round` have ended with 0
    kFailed,  ///< `failure` in `round`; its node's address and rank are the agent's to fill in
    kClose,   ///< the job ends for all, with `status` and `text`
    kLeave,   ///< this node leaves; `text` says why: "has left the job (SIGTERM)"
  };
  Kind kind = Kind::kJoin;
  int port = 0;
  int round = 0;
  int status = 0;
  bool final = false;  ///< kFailed: it would fail again
  std::string text;
  WorkerFailure failure;
};

/// What the agent tells its launcher.
struct FromAgent {
  enum class Kind {
    kHost,     ///< this node serves the store
    kBegin,    ///< start the workers
    kRestart,  ///< stop them, and join again; `text` says why
    kClosed,   ///< the job is over, with `status` and `text`
    kLost,     ///< `text`: this agent cannot go on
    kSay,      ///< `text` is to be shown
  };
  Kind kind = Kind::kSay;
  Placement placement;
  int round = 0;
  int restarts = 0;
  int port = 0;
  int status = 0;
  std::string address;  ///< of rank 0's node
  std::string text;
};

std::string encode(const ToAgent& message);
std::string encode(const FromAgent& message);

/// Throw std::invalid_argument.
ToAgent decode_to_agent(const std::string& text);
FromAgent decode_from_agent(const std::string& text);

/// One message over a socket that keeps their boundaries (SOCK_SEQPACKET). False where the peer has
/// gone, or takes no more.
bool send_message(int socket, const std::string& text);

/// The next message, empty where there is none now; nothing at all once the peer has gone.
std::optional<std::string> receive_message(int socket);

}  // namespace ddp::launcher
