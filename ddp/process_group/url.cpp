#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/url.h>

namespace ddp::detail {
namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw UsageError(
      fmt::format("the init_method \"{}\" {}. Expected env://, tcp://host:port (for IPv6 "
                  "tcp://[address]:port) or "
                  "file:///path, the last two with rank and world_size in the options or as "
                  "?rank=0&world_size=2.",
                  text, why));
}

void parse_host_and_port(const std::string& authority, Url* url) {
  std::string port;
  if (!authority.empty() && authority.front() == '[') {
    const auto end = authority.find(']');
    if (end == std::string::npos) {
      refuse(url->text, "has a [ without its ]");
    }
    url->host = authority.substr(1, end - 1);
    if (end + 1 < authority.size()) {
      if (authority[end + 1] != ':') {
        refuse(url->text, "has something other than a port after its ]");
      }
      port = authority.substr(end + 2);
    }
  } else {
    const auto colon = authority.rfind(':');
    if (colon != authority.find(':')) {
      refuse(url->text, "has an IPv6 address without brackets");
    }
    url->host = authority.substr(0, colon);
    port = colon == std::string::npos ? "" : authority.substr(colon + 1);
  }
  if (url->host.empty()) {
    refuse(url->text, "names no host");
  }
  if (port.empty()) {
    refuse(url->text, "has no port");
  }
  const auto number = parse_integer(port);
  if (!number || *number < 0 || *number > 65535) {
    refuse(url->text,
           fmt::format("has the port \"{}\", which is not a number from 0 to 65535", port));
  }
  url->port = static_cast<std::uint16_t>(*number);
}

}  // namespace

Url parse_url(const std::string& text) {
  Url url;
  url.text = text;
  const auto separator = text.find("://");
  if (separator == std::string::npos) {
    refuse(text, "has no scheme");
  }
  url.scheme = text.substr(0, separator);
  auto rest = text.substr(separator + 3);
  if (const auto mark = rest.find('?'); mark != std::string::npos) {
    auto query = rest.substr(mark + 1);
    rest.resize(mark);
    while (!query.empty()) {
      const auto end = query.find('&');
      const auto item = query.substr(0, end);
      const auto equals = item.find('=');
      if (equals == std::string::npos) {
        refuse(text, fmt::format("has \"{}\" in its query, which is not key=value", item));
      }
      url.query[item.substr(0, equals)] = item.substr(equals + 1);
      query = end == std::string::npos ? "" : query.substr(end + 1);
    }
  }
  if (url.scheme == "tcp") {
    parse_host_and_port(rest.substr(0, rest.find('/')), &url);
  } else if (url.scheme == "file") {
    url.path = rest;
    if (url.path.empty() || url.path.front() != '/') {
      refuse(text, "names no absolute path");
    }
  } else if (url.scheme != "env") {
    refuse(text, fmt::format("has the unknown scheme \"{}\"", url.scheme));
  }
  return url;
}

}  // namespace ddp::detail
