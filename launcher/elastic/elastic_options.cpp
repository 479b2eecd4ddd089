#include <fmt/format.h>

#include <launcher/elastic/elastic_options.h>

namespace ddp::launcher {

std::string ElasticOptions::endpoint() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

}  // namespace ddp::launcher
