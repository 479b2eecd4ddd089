#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include <launcher/dry_run.h>
#include <launcher/environment.h>

namespace ddp::launcher {
namespace {

std::string quoted(std::string_view word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-./:=,+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain) return std::string(word);
  std::string text = "'";
  for (const char c : word) {
    if (c == '\'') {
      text.append("'\\''");
    } else {
      text.push_back(c);
    }
  }
  return text.append("'");
}

}  // namespace

std::string describe_job(const Job& job, const char* const* inherited) {
  const Options& options = job.options;
  std::string text;
  if (options.elastic) {
    text = fmt::format(
        "# an elastic job of {} to {} nodes that meet at {}: ranks, master and sizes are agreed on "
        "there;\n# as the first of {} nodes with as many workers it would be\n",
        options.elastic->least, options.elastic->most, options.elastic->endpoint(),
        options.elastic->most);
  }
  text += fmt::format("# node {} of {}: {} of {} workers, restarted at most {} times\n",
                      job.placement.node_rank, job.placement.nnodes, options.nproc_per_node,
                      job.placement.world_size, options.max_restarts);
  WorkerEnvironment environment(inherited, job, job.master, 0);
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    text += fmt::format("# rank {}", job.placement.rank(local_rank));
    if (!job.cpus.empty())
      text += fmt::format(", on cores {}", cpu_list(job.cpus[static_cast<size_t>(local_rank)]));
    text.push_back('\n');
    environment.of(local_rank);
    for (const std::string& variable : environment.own_variables()) {
      const auto equals = variable.find('=');
      text += fmt::format("{}={} \\\n", variable.substr(0, equals),
                          quoted(std::string_view(variable).substr(equals + 1)));
    }
    std::vector<std::string> words =
        job.command.for_rank(options.virtual_local_rank ? 0 : local_rank);
    words.front() = job.command.path;
    for (std::string& word : words) word = quoted(word);
    text += fmt::format("{}\n", fmt::join(words, " "));
  }
  return text;
}

}  // namespace ddp::launcher
