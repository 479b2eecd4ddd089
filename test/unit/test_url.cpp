#include <test/support/catch2.h>

#include <ddp/error.h>
#include <ddp/process_group/url.h>

using ddp::detail::parse_url;

TEST_CASE("the parts of an address") {
  const auto tcp = parse_url("tcp://node-1:29500?rank=1&world_size=2");
  CHECK(tcp.scheme == "tcp");
  CHECK(tcp.host == "node-1");
  CHECK(tcp.port == 29500);
  CHECK(tcp.query.at("rank") == "1");
  CHECK(tcp.query.at("world_size") == "2");
  CHECK(parse_url("tcp://[::1]:1").host == "::1");
  CHECK(parse_url("tcp://[fe80::1]:65535/").port == 65535);
  CHECK(parse_url("file:///shared/meet?rank=0").path == "/shared/meet");
  CHECK(parse_url("env://").scheme == "env");
}

TEST_CASE("a wrong address is quoted, with what is wrong and how one looks") {
  const std::pair<const char*, const char*> wrong[] = {
      {"127.0.0.1:29500", "has no scheme"},
      {"udp://127.0.0.1:1", "has the unknown scheme \"udp\""},
      {"tcp://127.0.0.1", "has no port"},
      {"tcp://127.0.0.1:", "has no port"},
      {"tcp://[::1]", "has no port"},
      {"tcp://:29500", "names no host"},
      {"tcp://host:65536", "has the port \"65536\""},
      {"tcp://host:-1", "has the port \"-1\""},
      {"tcp://host:http", "has the port \"http\""},
      {"tcp://::1:29500", "has an IPv6 address without brackets"},
      {"tcp://[::1:29500", "has a [ without its ]"},
      {"tcp://[::1]29500", "has something other than a port after its ]"},
      {"tcp://host:1?rank", "has \"rank\" in its query"},
      {"file://meet", "names no absolute path"},
      {"file://", "names no absolute path"},
  };
  for (const auto& [text, why] : wrong) {
    INFO(text);
    CHECK_THROWS_WITH(parse_url(text), contains(std::string("\"") + text + "\" " + why));
    CHECK_THROWS_WITH(parse_url(text), contains("Expected env://, tcp://host:port"));
  }
}
