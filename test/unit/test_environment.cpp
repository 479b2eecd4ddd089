#include <cstdlib>
#include <test/support/catch2.h>
#include <test/support/fake_process_group.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/barrier.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/meeting_place.h>
#include <ddp/process_group/network.h>
#include <ddp/process_group/process_group.h>

// What is read and refused before anything is sent.

using ddp::detail::locate;
using std::chrono::milliseconds;

namespace {

/// A whole environment of rank 1 of 2, with one variable changed ("" unsets).
class Environment {
 public:
  explicit Environment(const std::string& name = "", const std::string& value = "") {
    set("RANK", "1");
    set("WORLD_SIZE", "2");
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", "29500");
    set("LOCAL_WORLD_SIZE", "");
    set("LOCAL_RANK", "");
    if (!name.empty()) {
      set(name.c_str(), value);
    }
  }

 private:
  static void set(const char* name, const std::string& value) {
    if (value.empty()) {
      unsetenv(name);
    } else {
      setenv(name, value.c_str(), 1);
    }
  }
};

std::string refusal(const std::string& url = "env://", int rank = -1, int world_size = -1) {
  try {
    locate(url, rank, world_size, milliseconds(100));
  } catch (const ddp::UsageError& error) {
    return error.what();
  }
  return "(accepted)";
}

}  // namespace

TEST_CASE("env:// takes the launcher's variables") {
  const Environment whole;
  const auto place = locate("env://", -1, -1, milliseconds(100));
  CHECK(place.rank == 1);
  CHECK(place.world_size == 2);
  CHECK(place.host == "127.0.0.1");
  CHECK(place.port == 29500);
  CHECK(place.own_address == "127.0.0.1");
  CHECK(place.name == "127.0.0.1:29500");
}

TEST_CASE("the query and the options stand for the variables") {
  const Environment whole;
  CHECK(locate("env://?rank=0&world_size=3", -1, -1, milliseconds(100)).world_size == 3);
  CHECK(locate("env://", 0, 4, milliseconds(100)).world_size == 4);
}

TEST_CASE("a missing variable is named, with what sets it") {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const Environment without(name);
    CHECK_THAT(refusal(), contains("the environment variable " + name + " is not set"));
    CHECK_THAT(refusal(), contains("`launch`"));
  }
}

TEST_CASE("a malformed variable is named and quoted") {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"}) {
    for (const std::string value : {"two", "1x", " 1", "-5", "99999999999999999999"}) {
      const Environment wrong(name, value);
      // Only a rank elsewhere needs to know how many ranks are on its node.
      const auto text = name == "LOCAL_WORLD_SIZE" ? refusal("tcp://192.0.2.1:1", 1, 2) : refusal();
      CHECK_THAT(text, contains(name + " is \"" + value + "\""));
      CHECK_THAT(text, contains("expected a whole number from"));
    }
  }
}

TEST_CASE("a rank out of range is refused with the range") {
  {
    const Environment wrong("RANK", "2");
    CHECK_THAT(refusal(), contains("RANK is \"2\"; expected a whole number from 0 to 1"));
  }
  const Environment whole;
  CHECK_THAT(refusal("env://", 7, 3),
             contains("rank is 7 in the options; expected a whole number from 0 to 2"));
  CHECK_THAT(refusal("tcp://127.0.0.1:1?rank=2&world_size=2"),
             contains("rank is 2 in the init_method"));
  CHECK_THAT(refusal("tcp://127.0.0.1:1?rank=a&world_size=2"),
             contains("rank is a in the init_method"));
  CHECK_THAT(refusal("file:///tmp/x?rank=0&world_size=0"), contains("world_size is 0"));
}

TEST_CASE("a port out of range is refused") {
  for (const std::string value : {"0", "65536"}) {
    const Environment wrong("MASTER_PORT", value);
    CHECK_THAT(refusal(), contains("MASTER_PORT is \"" + value +
                                   "\"; expected a whole number from 1 to 65535"));
  }
}

TEST_CASE("tcp:// and file:// need rank and world_size from exactly one place") {
  CHECK_THAT(refusal("tcp://127.0.0.1:1"),
             contains("needs world_size: give InitProcessGroupOptions().world_size(...)"));
  CHECK_THAT(refusal("file:///tmp/x?world_size=2"), contains("needs rank"));
  CHECK_THAT(refusal("file:///tmp/x?rank=0&world_size=2", 0, -1), contains("rank is given twice"));
}

TEST_CASE("a master's address that is a URL or a path is refused") {
  for (const std::string value : {"tcp://10.0.0.1", "10.0.0.1/29500"}) {
    const Environment wrong("MASTER_ADDR", value);
    CHECK_THAT(refusal(), contains("MASTER_ADDR is \"" + value +
                                   "\"; expected a host name or a numeric address alone"));
  }
}

TEST_CASE("an unknown host is named, within the timeout") {
  const Environment wrong("MASTER_ADDR", "no-such-host.invalid");
  const auto start = std::chrono::steady_clock::now();
  const auto text = refusal();
  CHECK_THAT(text, contains("the host \"no-such-host.invalid\" has no address"));
  CHECK_THAT(text, contains("MASTER_ADDR"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
}

TEST_CASE("the address that a rank announces is that of its route to the master") {
  using ddp::detail::local_address_toward;
  CHECK(local_address_toward("127.0.0.1", 1) == "127.0.0.1");
  CHECK(local_address_toward("127.0.0.9", 1) == "127.0.0.1");
  CHECK(ddp::detail::is_loopback("127.0.1.1"));
  CHECK(ddp::detail::is_loopback("::1"));
  CHECK_FALSE(ddp::detail::is_loopback("10.0.0.1"));
  CHECK(ddp::detail::host_and_port("::1", 5) == "[::1]:5");
  // No socket may be connected to it unless it asks for that.
  CHECK_THROWS_WITH(local_address_toward("255.255.255.255", 5),
                    contains("this machine has no route to the master 255.255.255.255:5"));
}

TEST_CASE("ranks that are all on one node use loopback") {
  const Environment whole("LOCAL_WORLD_SIZE", "2");
  CHECK(locate("tcp://192.0.2.1:1", 1, 2, milliseconds(100)).own_address == "127.0.0.1");
}

TEST_CASE("local_rank and local_world_size") {
  {
    const Environment whole;
    CHECK(ddp::local_rank() == 0);
    CHECK(ddp::local_world_size() == 1);
  }
  const Environment wrong("LOCAL_RANK", "one");
  CHECK_THROWS_WITH(ddp::local_rank(), contains("LOCAL_RANK is \"one\""));
}

TEST_CASE("without a group every question is refused, and destroying does nothing") {
  CHECK_FALSE(ddp::is_initialized());
  CHECK_THROWS_WITH(ddp::get_rank(), contains("there is no default process group: call "
                                              "ddp::init_process_group() first"));
  CHECK_THROWS_AS(ddp::get_world_size(), ddp::UsageError);
  ddp::destroy_process_group();
}

TEST_CASE("options that no group can be made of") {
  using Options = ddp::InitProcessGroupOptions;
  CHECK_THROWS_WITH(
      ddp::init_process_group("mpi"),
      contains(
          "init_process_group: the backend \"mpi\" is unknown; use \"gloo\", \"shm\", \"nccl\""));
  CHECK_THROWS_WITH(ddp::init_process_group(Options().timeout(milliseconds(0))),
                    contains("init_process_group: timeout is 0 ms; it must be positive"));
  setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD", 1);
  CHECK_THROWS_WITH(ddp::init_process_group(), contains("TORCH_DISTRIBUTED_DEBUG is \"LOUD\""));
  unsetenv("TORCH_DISTRIBUTED_DEBUG");
}

TEST_CASE("a group of the program's own that has no store is refused") {
  const ddp::ProcessGroup group = c10::make_intrusive<ddp::test::FakeProcessGroup>(2);
  CHECK_THROWS_WITH(ddp::barrier(group), contains("the process group has no store"));
}

TEST_CASE("what other libraries say is shortened to what concerns the user") {
  const auto concise = [](const std::string& text) {
    return ddp::detail::concise(std::runtime_error(text));
  };
  CHECK(concise("[/src/pair.cc:547] Connection closed by peer [127.0.0.1]:1") ==
        "Connection closed by peer [127.0.0.1]:1");
  CHECK(concise("it failed.\nException raised from f at g.cpp:1") == "it failed");
  CHECK(concise("[/src/pair.cc:547] Application timeout caused pair closure") ==
        "the group's connections were closed after another operation had failed");
}
