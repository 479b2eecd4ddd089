#include <poll.h>

#include <utility>

#include <launcher/elastic/agent_channel.h>

namespace ddp::launcher {

void AgentChannel::say(const FromAgent& message) const { send_message(socket_, encode(message)); }

void AgentChannel::say(const std::string& text) const {
  FromAgent message;
  message.text = text;
  say(message);
}

bool AgentChannel::listen(std::chrono::milliseconds time) {
  if (!gone_ && messages_.empty()) {
    pollfd ready{socket_, POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(time.count()));
  } else if (gone_) {
    ::poll(nullptr, 0, static_cast<int>(time.count()));
  }
  while (!gone_) {
    const auto text = receive_message(socket_);
    if (text && text->empty()) break;
    if (!text) {
      gone_ = true;
      leaving_ = "has left the job: its launcher ended without a word";
      break;
    }
    messages_.push_back(decode_to_agent(*text));
    const auto kind = messages_.back().kind;
    if (kind == ToAgent::Kind::kLeave || (kind == ToAgent::Kind::kClose && !taking_part_))
      leaving_ = messages_.back().text;
  }
  return !leaving_;
}

std::optional<ToAgent> AgentChannel::next() {
  if (messages_.empty()) return {};
  ToAgent first = std::move(messages_.front());
  messages_.pop_front();
  return first;
}

}  // namespace ddp::launcher
