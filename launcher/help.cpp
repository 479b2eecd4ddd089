#include <algorithm>
#include <string_view>
#include <vector>

#include <cxxopts.hpp>
#include <fmt/format.h>

#include <launcher/help.h>
#include <launcher/option_table.h>

namespace ddp::launcher {
namespace {

constexpr size_t kWidth = 100;

constexpr std::string_view kExamples = R"(
Examples:
  One node, four processes; any number of such jobs may run side by side:
    launch --nproc_per_node=4 ./train --epochs 10
  The same, each line with its rank before it and in a file as well, up to three more attempts:
    launch --nproc_per_node=4 --tee=3 --log_dir=logs --max_restarts=3 ./train
  Two nodes of eight processes, the first of them at 10.0.0.1; on each node in turn:
    launch --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 ./train
    launch --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --nproc_per_node=8 ./train
  Two to four nodes that come and go, the same command on each; one of them is at 10.0.0.1:
    launch --nnodes=2:4 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1 --rdzv_id=job7 \
      --max_restarts=3 --nproc_per_node=8 ./train
  SLURM, one launcher on each node, nothing else to be said:
    srun --nodes=2 --ntasks-per-node=1 launch --nproc_per_node=8 ./train
  Open MPI, the same:
    mpirun --map-by ppr:1:node -x MASTER_ADDR=10.0.0.1 launch --nproc_per_node=8 ./train

Options may be spelled with '-' or '_' and given as --x=1 or --x 1. They end at the program's
name: everything after it belongs to the program. What is not on the command line is read from the
environment: PET_NPROC_PER_NODE for --nproc_per_node, and so on.
Without --use_env the program's first argument is --local_rank=N; called as ddprun the launcher
leaves it out. A program whose name ends in .py runs under Python (PYTHON_EXEC, else python3).
The exit status is 0 when all workers succeed, else that of the worker that failed first
(128 + N when signal N killed it).
)";

}  // namespace

std::string help_text() {
  cxxopts::Options parser(
      "launch", "Starts a data-parallel job: N processes of one program, each with its rank.\n");
  parser.custom_help("[options] program [its arguments]").set_width(kWidth);
  std::vector<std::string> groups;
  for (const OptionSpec& option : option_table()) {
    const std::string name = option.letter != 0 ? fmt::format("{},{}", option.letter, option.name)
                                                : std::string(option.name);
    const std::string group(option.group);
    auto adder = parser.add_options(group);
    if (option.takes_value()) {
      adder(name, std::string(option.help), cxxopts::value<std::string>(),
            std::string(option.value));
    } else {
      adder(name, std::string(option.help));
    }
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  std::string text = parser.help(groups);
  for (const std::string& group : groups) {
    // The parser's own heading is "GROUP options".
    const std::string heading = group + " options:";
    const auto at = text.find(heading);
    if (at != std::string::npos) text.replace(at, heading.size(), group + ":");
  }
  return text.append(kExamples);
}

}  // namespace ddp::launcher
