#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <string_view>

#include <cxxopts.hpp>
#include <fmt/format.h>

#include <launcher/cores.h>
#include <launcher/error.h>
#include <launcher/options.h>
#include <launcher/split_arguments.h>

namespace ddp::launcher {
namespace {

constexpr int kMostNodes = 1 << 20;
constexpr int kMostWorkersPerNode = 1 << 16;
constexpr double kLongestGraceSeconds = 7 * 24 * 3600;

constexpr std::string_view kExamples = R"(
Examples:
  One node, four processes; any number of such jobs may run side by side:
    launch --nproc_per_node=4 ./train --epochs 10
  Two nodes of eight processes, the first of them at 10.0.0.1; on each node in turn:
    launch --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 ./train
    launch --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --nproc_per_node=8 ./train

Options may be spelled with '-' or '_' and given as --x=1 or --x 1. They end at the program's
name: everything after it belongs to the program. Without --use_env the program's first argument
is --local_rank=N; called as ddprun the launcher leaves it out.
The exit status is 0 when all workers succeed, else that of the worker that failed first
(128 + N when signal N killed it).
)";

[[noreturn]] void usage_error(const std::string& text) { throw Error(ExitStatus::kUsage, text); }

cxxopts::Options make_parser() {
  cxxopts::Options parser(
      "launch", "Starts a data-parallel job: N processes of one program, each with its rank.\n");
  parser.custom_help("[options] program [its arguments]");
  for (const OptionSpec& option : option_table()) {
    const std::string name = option.name == "help" ? "h,help" : std::string(option.name);
    auto adder = parser.add_options(std::string(option.group));
    if (option.takes_value()) {
      adder(name, std::string(option.help), cxxopts::value<std::string>(),
            std::string(option.value));
    } else {
      adder(name, std::string(option.help));
    }
  }
  return parser;
}

cxxopts::ParseResult parse_own(const std::vector<SplitArguments::Given>& given) {
  std::vector<std::string> words{"launch"};
  for (const auto& [option, value] : given) {
    words.push_back(option->takes_value() ? fmt::format("--{}={}", option->name, value)
                                          : fmt::format("--{}", option->name));
  }
  std::vector<const char*> pointers;
  for (const std::string& word : words) pointers.push_back(word.c_str());
  try {
    return make_parser().parse(static_cast<int>(pointers.size()), pointers.data());
  } catch (const std::exception& error) {
    usage_error(error.what());
  }
}

int whole_number(const cxxopts::ParseResult& parsed, const char* name, int least, int most,
                 int fallback, std::string_view also = "") {
  if (parsed.count(name) == 0) return fallback;
  const std::string& text = parsed[name].as<std::string>();
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end || value < least || value > most) {
    usage_error(fmt::format("--{} must be a whole number from {} to {}{}, not '{}'", name, least,
                            most, also, text));
  }
  return value;
}

int workers_per_node(const cxxopts::ParseResult& parsed) {
  constexpr const char* kName = "nproc_per_node";
  if (parsed.count(kName) != 0) {
    const std::string& text = parsed[kName].as<std::string>();
    if (text == "auto" || text == "cpu") return available_cores();
  }
  return whole_number(parsed, kName, 1, kMostWorkersPerNode, 1, ", or 'auto'");
}

std::chrono::milliseconds grace_period(const cxxopts::ParseResult& parsed) {
  constexpr const char* kName = "grace_period";
  if (parsed.count(kName) == 0) return Options{}.grace_period;
  const std::string& text = parsed[kName].as<std::string>();
  // Plain decimals; std::from_chars would need the mathematics library, which takes time to load.
  const bool decimal = !text.empty() && text.find_first_not_of("0123456789.") == std::string::npos;
  char* stopped = nullptr;
  const double seconds = decimal ? std::strtod(text.c_str(), &stopped) : -1;
  if (!decimal || *stopped != '\0' || seconds > kLongestGraceSeconds) {
    usage_error(fmt::format("--{} must be a number of seconds, 0 or more, not '{}'", kName, text));
  }
  return std::chrono::milliseconds(static_cast<long long>(seconds * 1000 + 0.5));
}

void check_nodes(const Options& options) {
  if (options.node_rank >= options.nnodes) {
    usage_error(
        fmt::format("--node_rank={} is out of range: with --nnodes={} node ranks go from 0 to {}",
                    options.node_rank, options.nnodes, options.nnodes - 1));
  }
  if (static_cast<long long>(options.nnodes) * options.nproc_per_node > INT_MAX) {
    usage_error(
        fmt::format("--nnodes={} times --nproc_per_node={} is more processes than a rank can count",
                    options.nnodes, options.nproc_per_node));
  }
  if (options.nnodes > 1 && options.master_addr.empty()) {
    usage_error(fmt::format(
        "--nnodes={} needs --master_addr=HOST: the address of node 0, the same on every "
        "node",
        options.nnodes));
  }
}

}  // namespace

Options parse_options(std::span<const char* const> argv) {
  SplitArguments split = split_arguments(argv.subspan(std::min<size_t>(1, argv.size())));
  const cxxopts::ParseResult parsed = parse_own(split.options);

  Options options;
  options.help = parsed.count("help") != 0;
  options.version = parsed.count("version") != 0;
  if (options.help || options.version) return options;

  options.nnodes = whole_number(parsed, "nnodes", 1, kMostNodes, 1);
  options.node_rank = whole_number(parsed, "node_rank", 0, kMostNodes - 1, 0);
  options.nproc_per_node = workers_per_node(parsed);
  options.master_port = whole_number(parsed, "master_port", 1, 65535, 0);
  if (parsed.count("master_addr") != 0) {
    options.master_addr = parsed["master_addr"].as<std::string>();
    if (options.master_addr.empty()) usage_error("--master_addr must not be empty");
  }
  options.grace_period = grace_period(parsed);
  check_nodes(options);

  const std::string_view called = argv.empty() ? "" : argv.front();
  options.use_env =
      parsed.count("use_env") != 0 || called.substr(called.rfind('/') + 1) == "ddprun";

  options.command = std::move(split.command);
  if (options.command.empty()) {
    usage_error(
        "no program given\nUsage: launch [options] program [its arguments]; see launch --help");
  }
  return options;
}

std::string help_text() {
  std::vector<std::string> groups;
  for (const OptionSpec& option : option_table()) {
    if (groups.empty() || groups.back() != option.group) groups.emplace_back(option.group);
  }
  std::string text = make_parser().help(groups);
  for (const std::string& group : groups) {
    // The parser's own heading is "GROUP options".
    const std::string heading = group + " options:";
    const auto at = text.find(heading);
    if (at != std::string::npos) text.replace(at, heading.size(), group + ":");
  }
  return text.append(kExamples);
}

}  // namespace ddp::launcher
