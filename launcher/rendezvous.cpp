#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <launcher/rendezvous.h>

namespace ddp::launcher {
namespace {

constexpr int kMostAttempts = 1000;

/// Keys of torchrun's rendezvous backends. Only the first two say something to the static one; the
/// last three, and heartbeat_timeout, are taken without effect.
constexpr std::array<std::string_view, 11> kKeys = {"timeout",
                                                    "join_timeout",
                                                    "last_call_timeout",
                                                    "close_timeout",
                                                    "keep_alive_interval",
                                                    "keep_alive_max_attempt",
                                                    "read_timeout",
                                                    "is_host",
                                                    "heartbeat_timeout",
                                                    "store_type",
                                                    "rank"};

bool read_truth(const std::string& source, std::string_view key, std::string_view text) {
  for (const std::string_view yes : {"1", "true", "True", "t", "yes", "y"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"0", "false", "False", "f", "no", "n"}) {
    if (text == no) return false;
  }
  usage_error(fmt::format("{}: {} must be 0 or 1, not '{}'", source, key, text));
}

void read_setting(Rendezvous& rendezvous, const std::string& source, std::string_view key,
                  std::string_view text) {
  ElasticOptions& elastic = rendezvous.elastic;
  const auto seconds = [&](bool zero) {
    const auto time = parse_seconds(std::string(text));
    if (!time || (!zero && time->count() == 0)) {
      usage_error(fmt::format("{}: {} must be a number of seconds{}, not '{}'", source, key,
                              zero ? "" : " more than 0", text));
    }
    return *time;
  };
  if (key == "timeout" || key == "join_timeout") {
    elastic.join_timeout = seconds(/*zero=*/true);
    rendezvous.patience = std::chrono::ceil<std::chrono::seconds>(elastic.join_timeout);
  } else if (key == "last_call_timeout") {
    elastic.last_call_timeout = seconds(/*zero=*/true);
  } else if (key == "close_timeout") {
    elastic.close_timeout = seconds(/*zero=*/true);
  } else if (key == "keep_alive_interval") {
    elastic.keep_alive_interval = seconds(/*zero=*/false);
  } else if (key == "read_timeout") {
    elastic.read_timeout = seconds(/*zero=*/false);
  } else if (key == "is_host") {
    elastic.is_host = read_truth(source, key, text);
  } else if (key == "keep_alive_max_attempt") {
    const auto number = parse_whole_number(text, 1, kMostAttempts);
    if (!number) {
      usage_error(fmt::format("{}: {} must be a whole number from 1 to {}, not '{}'", source, key,
                              kMostAttempts, text));
    }
    elastic.keep_alive_max_attempt = *number;
  } else if (key == "store_type" && rendezvous.c10d && text != "tcp") {
    usage_error(fmt::format("{}: store_type must be 'tcp', not '{}'", source, text));
  }
}

void read_conf(Rendezvous& rendezvous, const OptionValues::Value& conf) {
  for (const std::string_view part : split_at_commas(conf.text)) {
    const auto equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == part.size()) {
      usage_error(fmt::format("{} must be KEY=VALUE,KEY=VALUE and so on, not '{}'", conf.source,
                              conf.text));
    }
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) {
      usage_error(fmt::format("{}: unknown key '{}'; there are {}", conf.source, key,
                              fmt::join(kKeys, ", ")));
    }
    read_setting(rendezvous, conf.source, key, part.substr(equals + 1));
  }
}

void read_id(Rendezvous& rendezvous, const OptionValues::Value& id) {
  // It is the name of a folder under --log_dir.
  const bool control = std::any_of(id.text.begin(), id.text.end(),
                                   [](unsigned char c) { return c < ' ' || c == 0x7f; });
  if (id.text.empty() || id.text == "." || id.text == ".." || id.text.size() > 200 || control ||
      id.text.find('/') != std::string::npos) {
    usage_error(fmt::format("{} must be a name without '/', at most 200 bytes long, not '{}'",
                            id.source, id.text));
  }
  rendezvous.run_id = id.text;
}

void read_endpoint(Rendezvous& rendezvous, const OptionValues& values,
                   const OptionValues::Value& value) {
  const auto endpoint = parse_endpoint(value.text);
  const auto port = endpoint && !endpoint->port.empty()
                        ? parse_whole_number(endpoint->port, rendezvous.c10d ? 0 : 1, 65535)
                        : std::optional<int>(0);
  if (!endpoint || !port) {
    usage_error(fmt::format("{} must be HOST or HOST:PORT with a port from 1 to 65535, not '{}'",
                            value.source, value.text));
  }
  if (rendezvous.c10d) {
    rendezvous.elastic.host = endpoint->host;
    if (!endpoint->port.empty()) rendezvous.elastic.port = static_cast<uint16_t>(*port);
    return;
  }
  const auto conflict = [&](const char* name, bool differs) {
    const OptionValues::Value* other = values.find(name);
    if (other == nullptr || other->on_command_line != value.on_command_line || !differs) return;
    usage_error(fmt::format("{}={} and {}={} contradict each other: give one of them", value.source,
                            value.text, other->source, other->text));
  };
  const auto wins = [&](const char* name) {
    const OptionValues::Value* other = values.find(name);
    return other == nullptr || !other->on_command_line || value.on_command_line;
  };
  conflict("master_addr", rendezvous.master_addr != endpoint->host);
  if (wins("master_addr")) rendezvous.master_addr = endpoint->host;
  if (*port == 0) return;
  conflict("master_port", rendezvous.master_port != *port);
  if (wins("master_port")) rendezvous.master_port = *port;
}

}  // namespace

std::optional<Endpoint> parse_endpoint(std::string_view text) {
  Endpoint endpoint;
  std::string_view rest;
  if (text.substr(0, 1) == "[") {
    const auto end = text.find(']');
    if (end == std::string_view::npos) return {};
    endpoint.host = text.substr(1, end - 1);
    rest = text.substr(end + 1);
  } else {
    // More than one colon without brackets is an IPv6 address alone.
    const auto colon = text.find(':');
    const bool several = colon != std::string_view::npos && text.rfind(':') != colon;
    endpoint.host = text.substr(0, several ? text.npos : colon);
    if (!several && colon != std::string_view::npos) rest = text.substr(colon);
  }
  if (endpoint.host.empty()) return {};
  if (rest.empty()) return endpoint;
  if (rest.front() != ':' || rest.size() == 1) return {};
  endpoint.port = rest.substr(1);
  return endpoint;
}

Rendezvous read_rendezvous(const OptionValues& values) {
  Rendezvous rendezvous;
  const std::string backend = values.text("rdzv_backend", "static");
  if (backend != "static" && backend != "c10d") {
    usage_error(fmt::format("{} must be 'static' or 'c10d', not '{}'",
                            values.find("rdzv_backend")->source, backend));
  }
  rendezvous.c10d = backend == "c10d";
  if (const auto* conf = values.find("rdzv_conf")) read_conf(rendezvous, *conf);
  if (const auto* id = values.find("rdzv_id")) read_id(rendezvous, *id);
  rendezvous.master_addr = values.text("master_addr");
  rendezvous.master_port = values.whole_number("master_port", 1, 65535, 0);
  const auto* endpoint = values.find("rdzv_endpoint");
  if (endpoint != nullptr && !endpoint->text.empty() && !values.flag("standalone"))
    read_endpoint(rendezvous, values, *endpoint);
  return rendezvous;
}

}  // namespace ddp::launcher
