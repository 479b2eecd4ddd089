// Texts taken apart and put together: lines, error files, prefixes, lists of cores.

#include <random>
#include <string>
#include <utility>
#include <vector>

#include <launcher/error_file.h>
#include <launcher/json_strings.h>
#include <launcher/line_splitter.h>
#include <launcher/numa.h>
#include <launcher/text_template.h>

#include "catch2.h"

using namespace ddp::launcher;

namespace {

/// The lines of `text`, each after '|' for "\n" or '>' for "\r"; '_' is the end of a bar.
std::string lines_of(const std::string& text, size_t piece) {
  LineSplitter splitter;
  std::string result;
  const auto show = [&](std::string_view line, char end) {
    result.append(end == '\n' ? "|" : ">").append(line);
  };
  for (size_t i = 0; i < text.size(); i += piece) {
    splitter.feed(std::string_view(text).substr(i, piece), show, [&] { result.push_back('_'); });
  }
  splitter.finish(show);
  return result;
}

}  // namespace

TEST_CASE("a stream is cut into lines, however it comes") {
  for (const size_t piece : {1000u, 3u, 2u}) {
    CHECK(lines_of("one\ntwo\n\nfour", piece) == "|one|two||four");
    CHECK(lines_of("", piece) == "");
    CHECK(lines_of("\r10%\r20%\r", piece) == ">10%>20%");
  }
  CHECK(lines_of("a\r\nb\r\n", 1000) == "|a|b");
  CHECK(lines_of("a\r\nb", 1) == ">a_|b");  // the same on a screen
  CHECK(lines_of("a\r\n\nb", 1) == ">a_||b");
  CHECK(lines_of(std::string("a\0b\n\xff", 5), 1000) == std::string("|a\0b|\xff", 6));
}

TEST_CASE("a line without an end is cut, and nothing of it is lost") {
  const std::string longest(LineSplitter::kLongest, 'x');
  for (const size_t piece : {size_t{1} << 20, size_t{4096}}) {
    CHECK(lines_of(longest, piece) == "|" + longest);
    CHECK(lines_of(longest + longest + "y\n", piece) == "|" + longest + "|" + longest + "|y");
  }
}

TEST_CASE("values take their places in a template") {
  const std::map<std::string, std::string, std::less<>> values = {{"rank", "3"},
                                                                  {"role_name", "r"}};
  CHECK(expand_template("[${role_name}$rank]:", values) == "[r3]:");
  CHECK(expand_template("$ranks ${rank ${x} $ $$rank", values) == "$ranks ${rank ${x} $ $3");
  CHECK(expand_template("", values) == "");
}

TEST_CASE("strings of a JSON text by their names") {
  const auto read = [](const std::string& text) { return read_json_strings(text); };
  const auto some =
      read(R"( {"a": {"b": "x", "n": 1}, "c": [{"d": "y"}, []], "e": null, "f": "z"} )");
  REQUIRE(some);
  CHECK(*some == std::map<std::string, std::string>{{"a.b", "x"}, {"f", "z"}});
  const auto escapes = read(R"({"a": "\"\\\/\b\n\u00e4\u20ac\ud83d\ude00\ud83dx"})");
  REQUIRE(escapes);
  CHECK(escapes->at("a") == "\"\\/\b\n\u00e4\u20ac\U0001F600\ufffdx");
  for (const std::string text : {"", "{", "}", "{\"a\"", "{\"a\":", "{\"a\":\"", "{\"a\":\"\\",
                                 "{\"a\":\"\\u12", "{\"a\" 1}", "{\"a\":1,}", "[1,]", "{} x", "\"a",
                                 "{'a': 1}", "{\"a\": \"\\x\"}", "[", "[1 2]"}) {
    INFO(text);
    CHECK_FALSE(read(text));
  }
  CHECK_FALSE(read(std::string(100000, '[')));
  CHECK_FALSE(read(std::string(100000, '{')));
  CHECK(read("[[[]]]"));
}

TEST_CASE("garbage is no JSON, and does no harm") {
  std::mt19937 random(7);
  const std::string letters = "{}[]\",:\\u0aé \n1x";
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (size_t i = random() % 40; i > 0; --i) text.push_back(letters[random() % letters.size()]);
    read_json_strings(text);
    CHECK(error_text(text).size() <= text.size());
  }
}

TEST_CASE("an error file's text, as torch writes it and otherwise") {
  CHECK(error_text(
            R"({"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "1"}}})") ==
        "ValueError: no");
  CHECK(error_text(R"({"message": "plain", "timestamp": 1})") == "plain");
  CHECK(error_text(
            R"({"message": {"message": "E: x", "extraInfo": {"py_callstack": "at 1\nE: x\n"}}})") ==
        "at 1\nE: x");
  CHECK(error_text(R"({"message": {"message": "E: x", "extraInfo": {"py_callstack": "at 1"}}})") ==
        "E: x\nat 1");
  CHECK(error_text("no JSON\n") == "no JSON");
  CHECK(error_text("") == "");
  CHECK(error_text("\x1b[31mred\a\n\tb") == "?[31mred?\n\tb");
  const std::string cut = error_text(std::string(100000, 'x') + "end");
  CHECK(cut.size() < 5000);
  CHECK(cut.substr(cut.size() - 3) == "end");
}

TEST_CASE("the kernel's lists of cores") {
  CHECK(parse_cpu_list("0-3,8,10-11") == CpuSet{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("0") == CpuSet{0});
  CHECK(parse_cpu_list("").empty());
  CHECK(parse_cpu_list("x").empty());
}
