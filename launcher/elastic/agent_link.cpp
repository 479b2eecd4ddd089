#include <stdexcept>
#include <utility>

#include <launcher/elastic/agent_link.h>
#include <launcher/error.h>

namespace ddp::launcher {

AgentLink::AgentLink(UniqueFd socket, EventLoop& loop) : socket_(std::move(socket)), loop_(loop) {
  loop_.watch(socket_.get(), EPOLLIN, {EventTag::Source::kAgent, 0});
}

std::vector<std::string> AgentLink::handle() {
  std::vector<std::string> said;
  while (socket_) {
    const auto text = receive_message(socket_.get());
    if (text && text->empty()) break;
    if (!text) {
      lose("the process that talks to the rendezvous (ddp-rendezvous) was killed");
      break;
    }
    try {
      take(decode_from_agent(*text), said);
    } catch (const std::invalid_argument& error) {
      lose(error.what());
    }
  }
  return said;
}

void AgentLink::take(FromAgent message, std::vector<std::string>& said) {
  switch (message.kind) {
    case FromAgent::Kind::kHost:
      host_ = true;
      break;
    case FromAgent::Kind::kBegin:
      round_ = Round{message.placement, message.round, message.restarts, std::move(message.address),
                     message.port};
      restart_.reset();
      break;
    case FromAgent::Kind::kRestart:
      restart_ = std::move(message.text);
      break;
    case FromAgent::Kind::kClosed:
      end_ = End{message.status, std::move(message.text), false};
      break;
    case FromAgent::Kind::kLost:
      lose(message.text);
      break;
    case FromAgent::Kind::kSay:
      said.push_back(std::move(message.text));
      break;
  }
}

void AgentLink::lose(const std::string& text) {
  if (socket_) loop_.forget(socket_.get());
  socket_.reset();
  if (!end_) end_ = End{ExitStatus::kSetup, text, true};
}

void AgentLink::tell(const ToAgent& message) {
  // Where it does not arrive, the end of the socket will be read.
  if (socket_) send_message(socket_.get(), encode(message));
}

void AgentLink::join(uint16_t port) {
  round_.reset();
  restart_.reset();
  ToAgent message;
  message.kind = ToAgent::Kind::kJoin;
  message.port = port;
  tell(message);
}

void AgentLink::report_done() {
  ToAgent message;
  message.kind = ToAgent::Kind::kDone;
  message.round = round_->number;
  tell(message);
}

void AgentLink::report_failure(const WorkerFailure& failure, bool final) {
  ToAgent message;
  message.kind = ToAgent::Kind::kFailed;
  message.round = round_->number;
  message.failure = failure;
  message.final = final;
  tell(message);
}

void AgentLink::close(int status, const std::string& why) {
  ToAgent message;
  message.kind = ToAgent::Kind::kClose;
  message.status = status;
  message.text = why;
  tell(message);
}

void AgentLink::leave(const std::string& how) {
  ToAgent message;
  message.kind = ToAgent::Kind::kLeave;
  message.text = how;
  tell(message);
}

}  // namespace ddp::launcher
