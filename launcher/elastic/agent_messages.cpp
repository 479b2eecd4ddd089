#include <sys/socket.h>

#include <cerrno>

#include <launcher/elastic/agent_messages.h>
#include <launcher/elastic/fields.h>

namespace ddp::launcher {
namespace {

constexpr size_t kLongestText = 16 * 1024;
constexpr size_t kLongestMessage = 4 * kLongestText;

std::string bounded(const std::string& text) { return text.substr(0, kLongestText); }

}  // namespace

std::string encode(const ToAgent& message) {
  const WorkerFailure& failure = message.failure;
  FieldWriter out;
  out.number(static_cast<int>(message.kind)).number(message.port).number(message.round);
  out.number(message.status).flag(message.final).text(bounded(message.text));
  out.number(failure.rank).number(failure.local_rank).number(failure.pid).number(failure.status);
  out.text(bounded(failure.how));
  return out.str();
}

ToAgent decode_to_agent(const std::string& text) {
  FieldReader in(text);
  ToAgent message;
  message.kind = static_cast<ToAgent::Kind>(in.integer());
  message.port = in.integer();
  message.round = in.integer();
  message.status = in.integer();
  message.final = in.flag();
  message.text = in.text();
  message.failure.rank = in.integer();
  message.failure.local_rank = in.integer();
  message.failure.pid = in.number();
  message.failure.status = in.integer();
  message.failure.how = in.text();
  return message;
}

std::string encode(const FromAgent& message) {
  const Placement& placement = message.placement;
  FieldWriter out;
  out.number(static_cast<int>(message.kind)).number(placement.node_rank).number(placement.nnodes);
  out.number(placement.first_rank).number(placement.world_size).number(message.round);
  out.number(message.restarts).number(message.port).number(message.status);
  out.text(bounded(message.address)).text(bounded(message.text));
  return out.str();
}

FromAgent decode_from_agent(const std::string& text) {
  FieldReader in(text);
  FromAgent message;
  message.kind = static_cast<FromAgent::Kind>(in.integer());
  message.placement.node_rank = in.integer();
  message.placement.nnodes = in.integer();
  message.placement.first_rank = in.integer();
  message.placement.world_size = in.integer();
  message.round = in.integer();
  message.restarts = in.integer();
  message.port = in.integer();
  message.status = in.integer();
  message.address = in.text();
  message.text = in.text();
  return message;
}

bool send_message(int socket, const std::string& text) {
  const ssize_t sent = ::send(socket, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(text.size());
}

std::optional<std::string> receive_message(int socket) {
  std::string text(kLongestMessage, '\0');
  ssize_t size = ::recv(socket, text.data(), text.size(), MSG_DONTWAIT);
  // A peer that ends with something unread makes one call fail before its last words come.
  if (size < 0 && errno == ECONNRESET)
    size = ::recv(socket, text.data(), text.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::string();
  if (size <= 0) return {};
  text.resize(static_cast<size_t>(size));
  return text;
}

}  // namespace ddp::launcher
