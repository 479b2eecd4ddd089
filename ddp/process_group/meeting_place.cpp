#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/meeting_place.h>
#include <ddp/process_group/network.h>
#include <ddp/process_group/url.h>

namespace ddp::detail {
namespace {

constexpr std::int64_t kMostRanks = 1 << 20;

/// One of rank and world_size: from the options, the address's query, or (env://) a variable.
class Identity {
 public:
  Identity(const Url& url, const char* name, const char* variable, int option)
      : url_(url), name_(name), variable_(variable), option_(option) {}

  int read(std::int64_t minimum, std::int64_t maximum) const {
    const auto entry = url_.query.find(name_);
    if (entry == url_.query.end()) {
      if (option_ >= 0) {
        return in_range(option_, std::to_string(option_), minimum, maximum, "in the options");
      }
      if (url_.scheme == "env") {
        return static_cast<int>(required_environment_integer(variable_, minimum, maximum));
      }
      throw UsageError(fmt::format(
          "the init_method \"{0}\" needs {1}: give InitProcessGroupOptions().{1}(...), or "
          "?{1}=... in the address",
          url_.text, name_));
    }
    if (option_ >= 0) {
      throw UsageError(
          fmt::format("{} is given twice: {} in the options and {} in the init_method \"{}\"",
                      name_, option_, entry->second, url_.text));
    }
    const auto number = parse_integer(entry->second);
    return in_range(number.value_or(minimum - 1), entry->second, minimum, maximum,
                    fmt::format("in the init_method \"{}\"", url_.text));
  }

 private:
  int in_range(std::int64_t value, const std::string& text, std::int64_t minimum,
               std::int64_t maximum, const std::string& where) const {
    if (value < minimum || value > maximum) {
      throw UsageError(fmt::format("{} is {} {}; expected a whole number from {} to {}", name_,
                                   text, where, minimum, maximum));
    }
    return static_cast<int>(value);
  }

  const Url& url_;
  const char* name_;
  const char* variable_;
  int option_;
};

}  // namespace

MeetingPlace locate(const std::string& text, int rank, int world_size,
                    std::chrono::milliseconds timeout) {
  const auto url = parse_url(text);
  MeetingPlace place;
  place.world_size = Identity(url, "world_size", "WORLD_SIZE", world_size).read(1, kMostRanks);
  place.rank = Identity(url, "rank", "RANK", rank).read(0, place.world_size - 1);
  if (url.scheme == "file") {
    place.kind = MeetingPlace::Kind::kFile;
    place.path = url.path;
    place.name = url.path;
    // Ranks that share a file may sit on several machines; without a master's address, the
    // interface is the user's to name (GLOO_SOCKET_IFNAME).
    place.own_address = "127.0.0.1";
    return place;
  }
  const bool env = url.scheme == "env";
  const auto host = env ? required_environment("MASTER_ADDR") : url.host;
  if (host.find("://") != std::string::npos || host.find('/') != std::string::npos) {
    throw UsageError(fmt::format(
        "{} is \"{}\"; expected a host name or a numeric address alone, such as \"10.0.0.1\"",
        env ? "the environment variable MASTER_ADDR" : "the init_method's host", host));
  }
  place.port =
      env ? static_cast<std::uint16_t>(required_environment_integer("MASTER_PORT", 1, 65535))
          : *url.port;
  place.host = resolve(host, timeout);
  place.name = host_and_port(host, place.port);
  if (is_loopback(place.host)) {
    place.own_address = place.host;
  } else if (environment_integer("LOCAL_WORLD_SIZE", 1, kMostRanks, 0) == place.world_size) {
    // All ranks are on one node: nothing needs to leave the machine.
    place.own_address = "127.0.0.1";
  } else {
    place.own_address = local_address_toward(place.host, place.port);
  }
  return place;
}

}  // namespace ddp::detail
