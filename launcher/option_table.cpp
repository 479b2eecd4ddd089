#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include <launcher/option_table.h>

namespace ddp::launcher {
namespace {

constexpr std::string_view kHere = "How many processes";
constexpr std::string_view kNodes = "Several nodes";
constexpr std::string_view kProgram = "How the program learns its rank";
constexpr std::string_view kStop = "Stopping";
constexpr std::string_view kAbout = "About";

constexpr std::array kOptions = {
    OptionSpec{
        "nproc_per_node", "N", kHere,
        "Processes to start on this node: a number, or 'auto' for one per core (default: 1)"},
    OptionSpec{"nnodes", "N", kNodes, "Number of nodes of the job (default: 1)"},
    OptionSpec{"node_rank", "N", kNodes, "Which of them this one is, from 0 (default: 0)"},
    OptionSpec{"master_addr", "HOST", kNodes,
               "Address of node 0; needed with several nodes (default on one node: 127.0.0.1)"},
    OptionSpec{"master_port", "PORT", kNodes,
               "Port on node 0 (default: 29500 with several nodes, a free one on a single node)"},
    OptionSpec{"use_env", "", kProgram,
               "Leave the rank to the environment (LOCAL_RANK and so on): the program gets no "
               "argument --local_rank=N"},
    OptionSpec{"grace_period", "SECONDS", kStop,
               "Time from asking the workers to end until they are killed (default: 30)"},
    OptionSpec{"help", "", kAbout, "Show this text"},
    OptionSpec{"version", "", kAbout, "Show the version"},
};

std::string canonical(std::string_view name) {
  std::string result(name);
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

}  // namespace

std::span<const OptionSpec> option_table() { return kOptions; }

const OptionSpec* find_option(std::string_view name) {
  const std::string wanted = canonical(name);
  const auto found = std::find_if(kOptions.begin(), kOptions.end(),
                                  [&](const OptionSpec& option) { return option.name == wanted; });
  return found == kOptions.end() ? nullptr : &*found;
}

std::string suggest_option(std::string_view name) {
  const std::string wanted = canonical(name);
  if (wanted.size() < 3) return {};
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, wanted.size() / 3) + 1;
  for (const OptionSpec& option : kOptions) {
    const bool prefix = option.name.substr(0, wanted.size()) == wanted;
    const size_t distance = prefix ? 1 : edit_distance(wanted, option.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = option.name;
    }
  }
  return std::string(best);
}

}  // namespace ddp::launcher
