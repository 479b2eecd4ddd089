#include <cstdlib>
#include <exception>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <test/support/catch2.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <ddp/error.h>
#include <ddp/json_quoted.h>
#include <ddp/record_errors.h>

// What a program says of an exception that it does not catch.

using ddp::detail::json_quoted;

namespace {

struct Outcome {
  int status;  ///< as wait gives it
  std::string file;
  std::string errors;
};

std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Runs `body` in a process of its own, whose error file is `file` (empty: one of the test's).
template <class Body>
Outcome run(const Body& body, std::string file = "") {
  char folder[] = "/tmp/record-errors-XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  const std::string errors = std::string(folder) + "/stderr";
  const bool own = file.empty();
  if (own) file = std::string(folder) + "/error.json";
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("TORCHELASTIC_ERROR_FILE", file.c_str(), 1);
    setenv("RANK", "3", 1);
    if (std::freopen(errors.c_str(), "w", stderr) == nullptr) _exit(99);
    const int status = ddp::record_errors(body);
    std::fflush(stderr);
    _exit(status);
  }
  Outcome outcome{};
  REQUIRE(waitpid(pid, &outcome.status, 0) == pid);
  outcome.errors = read(errors);
  if (own) outcome.file = read(file);
  unlink(errors.c_str());
  if (own) unlink(file.c_str());
  rmdir(folder);
  return outcome;
}

bool exited(const Outcome& outcome, int code) {
  return WIFEXITED(outcome.status) && WEXITSTATUS(outcome.status) == code;
}

}  // namespace

TEST_CASE("what the body returns is returned, and nothing is written") {
  for (const int status : {0, 7}) {
    const auto outcome = run([&] { return status; });
    CHECK(exited(outcome, status));
    CHECK(outcome.file.empty());
    CHECK(outcome.errors.empty());
  }
  CHECK(exited(run([] {}), 0));
}

TEST_CASE("an exception is printed, written as @record writes it, and becomes status 1") {
  const auto outcome = run([] { throw ddp::UsageError("the \"text\"\nof it"); });
  CHECK(exited(outcome, 1));
  CHECK_THAT(outcome.errors, contains("rank 3: the \"text\"\nof it\n"));
  CHECK(outcome.file.starts_with(
      R"({"message": {"message": "ddp::UsageError: the \"text\"\nof it", "extraInfo": {"timestamp": ")"));
  CHECK_THAT(outcome.file, contains("\"timestamp_us\": \""));
  CHECK(outcome.file.ends_with("\"}}}"));
  CHECK_THAT(outcome.file, !contains("py_callstack"));
}

TEST_CASE("a text that names its rank is printed as it is") {
  const auto outcome = run([] { throw std::runtime_error("rank 3: told"); });
  CHECK_THAT(outcome.errors, contains(": rank 3: told\n"));
  CHECK_THAT(outcome.errors, !contains("rank 3: rank 3"));
}

TEST_CASE("LibTorch's errors have their call stack in the file, the words at its end") {
  const auto outcome = run([] { TORCH_CHECK(false, "these words"); });
  CHECK_THAT(outcome.errors, contains("these words"));
  CHECK_THAT(outcome.errors, !contains("frame #0"));
  CHECK_THAT(outcome.file, contains("\"message\": \"c10::Error: these words"));
  const auto stack = outcome.file.find("\"py_callstack\": \"");
  REQUIRE(stack != std::string::npos);
  const auto frame = outcome.file.find("frame #0", stack);
  REQUIRE(frame != std::string::npos);
  CHECK(outcome.file.find("c10::Error: these words", frame) != std::string::npos);
}

TEST_CASE("an exception's causes are told, and one that is no std::exception is") {
  const auto nested = run([] {
    try {
      throw std::invalid_argument("the cause");
    } catch (...) {
      std::throw_with_nested(std::runtime_error("the effect"));
    }
  });
  CHECK_THAT(nested.errors, contains("the effect\nbecause of std::invalid_argument: the cause\n"));
  const auto number = run([] { throw 5; });
  CHECK(exited(number, 1));
  CHECK_THAT(number.file, contains("\"int: an exception that is not a std::exception\""));
}

TEST_CASE("what ends the process otherwise is written as well") {
  const auto thread =
      run([] { std::thread([] { throw std::out_of_range("in a thread"); }).join(); });
  CHECK(WIFSIGNALED(thread.status));
  CHECK_THAT(thread.file, contains("\"std::out_of_range: in a thread\""));
  const auto bare = run([] { std::terminate(); });
  CHECK(WIFSIGNALED(bare.status));
  CHECK_THAT(bare.file, contains("\"std::terminate was called without an exception\""));
}

TEST_CASE("an error file that cannot be written is named, and the error is printed all the same") {
  const auto outcome = run([] { throw std::runtime_error("told"); }, "/nowhere/error.json");
  CHECK(exited(outcome, 1));
  CHECK_THAT(outcome.errors, contains("rank 3: told\n"));
  CHECK_THAT(outcome.errors, contains("the error could not be written to /nowhere/error.json"));
}

TEST_CASE("strings of JSON") {
  CHECK(json_quoted("") == "\"\"");
  CHECK(json_quoted("a\"b\\c\n\t\x7f") == "\"a\\\"b\\\\c\\n\\u0009\\u007f\"");
  CHECK(json_quoted("ä€😀") == "\"ä€😀\"");
  CHECK(json_quoted(std::string("\0", 1)) == "\"\\u0000\"");
  // Cut off, too long, half a pair, beyond the last character, no character at all.
  for (const char* wrong : {"\xe2\x82", "\xc0\xaf", "\xf5", "\xff", "\x80"}) {
    CHECK(json_quoted(wrong).starts_with("\"\\ufffd"));
  }
  CHECK(json_quoted("\xed\xa0\x80") == "\"\\ufffd\\ufffd\\ufffd\"");
  CHECK(json_quoted("\xf4\x90\x80\x80x") == "\"\\ufffd\\ufffd\\ufffd\\ufffdx\"");
}
