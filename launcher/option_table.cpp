#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include <launcher/option_table.h>

namespace ddp::launcher {
namespace {

constexpr std::string_view kHere = "How many processes";
constexpr std::string_view kNodes = "Several nodes";
constexpr std::string_view kProgram = "The program";
constexpr std::string_view kOutput = "Output";
constexpr std::string_view kStop = "Failing and stopping";
constexpr std::string_view kRendezvous = "Rendezvous, as torchrun has it";
constexpr std::string_view kAccepted = "Accepted for torchrun's sake";
constexpr std::string_view kAbout = "About";

constexpr std::array kOptions = {
    OptionSpec{"nproc_per_node", 0, "N", kHere,
               "Processes to start on this node: a number, 'gpu' or 'cpu' for one per GPU or core, "
               "'auto' for GPUs where there are any, else cores (default: 1)"},
    OptionSpec{"standalone", 0, "", kHere,
               "One node, whatever the environment says; rendezvous and master options are not "
               "looked at. Nothing else is needed for a single node"},
    OptionSpec{
        "numa_binding", 0, "MODE", kHere,
        "Keep each worker on cores near its GPU (without GPUs the machine's NUMA nodes in "
        "turn): 'node' those of its NUMA node, 'socket' of its socket, 'exclusive' a part of "
        "the node's that no other worker has, 'core-complex' some that share a cache"},
    OptionSpec{"virtual_local_rank", 0, "", kHere,
               "Show each worker one GPU alone (CUDA_VISIBLE_DEVICES), with LOCAL_RANK=0"},
    OptionSpec{"tune_malloc", 0, "", kHere,
               "Let the workers' malloc keep what they free: a training step asks for the same "
               "large pieces as the one before it, and gets them without page faults. Takes more "
               "memory; what the environment says of MALLOC_* stays"},
    OptionSpec{"nnodes", 0, "N", kNodes,
               "Number of nodes of the job, or with --rdzv_backend=c10d MIN:MAX of them, which may "
               "come and go while it runs (default: the batch system's, else 1)"},
    OptionSpec{"node_rank", 0, "N", kNodes, "Which of them this one is, from 0 (default: 0)"},
    OptionSpec{"master_addr", 0, "HOST", kNodes,
               "Address of node 0; needed with several nodes (default on one node: 127.0.0.1)"},
    OptionSpec{"master_port", 0, "PORT", kNodes,
               "Port on node 0 (default: 29500 with several nodes, a free one on a single node)"},
    OptionSpec{
        "local_addr", 0, "HOST", kNodes,
        "What to call this node in the failure report; with c10d also where the others reach "
        "it (default there: its address on the route to the endpoint)"},
    OptionSpec{"module", 'm', "", kProgram,
               "The program is the name of a Python module: python3 -u -m PROGRAM"},
    OptionSpec{"no_python", 0, "", kProgram, "Run the program itself even if its name ends in .py"},
    OptionSpec{"run_path", 0, "", kProgram,
               "Run the program under Python whatever its name ends in"},
    OptionSpec{"use_env", 0, "", kProgram,
               "Leave the rank to the environment (LOCAL_RANK and so on): the program gets no "
               "argument --local_rank=N"},
    OptionSpec{"role", 0, "NAME", kProgram, "ROLE_NAME for the workers (default: default)"},
    OptionSpec{"log_dir", 0, "FOLDER", kOutput,
               "Keep what workers write, and their error files, in "
               "FOLDER/RUN_ID/attempt_N/RANK/"},
    OptionSpec{"redirects", 'r', "WHICH", kOutput,
               "What goes to files instead of the screen: 1 standard output, 2 standard error, 3 "
               "both, 0 none; or by local rank: 0:3,1:2 (default: 0). Needs --log_dir"},
    OptionSpec{"tee", 't', "WHICH", kOutput,
               "What is shown line by line after a prefix, and with --log_dir goes to files as "
               "well; as for --redirects (default: 0)"},
    OptionSpec{"line_prefix", 0, "FORM", kOutput,
               "Show all that is not redirected line by line after a prefix: 'rank', 'role', "
               "'none', or a text with ${rank}, ${local_rank} and ${role_name} (default with "
               "--tee: rank)"},
    OptionSpec{"local_ranks_filter", 0, "RANKS", kOutput,
               "Local ranks whose output is shown, as 0,1; files are written for all "
               "(default: all)"},
    OptionSpec{"max_restarts", 0, "N", kStop,
               "Times that all workers are started again after a failure (default: 0)"},
    OptionSpec{"grace_period", 0, "SECONDS", kStop,
               "Time from asking the workers to end until they are killed (default: 30)"},
    OptionSpec{"timeout", 0, "SECONDS", kStop,
               "Time that the whole job may take; then it is stopped, with exit status 124 "
               "(default: none)"},
    OptionSpec{"signals_to_handle", 0, "NAMES", kStop,
               "Signals that end the job in order: passed to the workers, which may take the grace "
               "period (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT)"},
    OptionSpec{
        "rdzv_backend", 0, "NAME", kRendezvous,
        "'static': node ranks and the master's address are given. 'c10d': the nodes agree on "
        "them at --rdzv_endpoint, the same command on each, and restart together (default: "
        "static)"},
    OptionSpec{"rdzv_endpoint", 0, "HOST[:PORT]", kRendezvous,
               "c10d: where the nodes meet; the launcher on the node with this address serves it "
               "(default port: 29400). static: the same as --master_addr and --master_port"},
    OptionSpec{"rdzv_id", 0, "ID", kRendezvous,
               "TORCHELASTIC_RUN_ID for the workers, and the folder's name under --log_dir "
               "(default: a new one for each run, 'none' with several nodes)"},
    OptionSpec{"rdzv_conf", 0, "KEY=VALUE,...", kRendezvous,
               "timeout: seconds to wait until the master's name has an address (default: 30). "
               "c10d: join_timeout=600, last_call_timeout=30, close_timeout=30, "
               "keep_alive_interval=5, keep_alive_max_attempt=3, read_timeout=60, is_host"},
    OptionSpec{"monitor_interval", 0, "SECONDS", kAccepted,
               "No effect: a worker's end is noticed at once"},
    OptionSpec{"start_method", 0, "NAME", kAccepted,
               "spawn, fork or forkserver. No effect: the workers are programs"},
    OptionSpec{"event_log_handler", 0, "NAME", kAccepted, "No effect"},
    OptionSpec{"dry_run", 0, "", kAbout,
               "Show what would be started, with its environment, and start nothing"},
    OptionSpec{"help", 'h', "", kAbout, "Show this text"},
    OptionSpec{"version", 0, "", kAbout, "Show the version"},
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

const OptionSpec* find_option(char letter) {
  const auto found = std::find_if(kOptions.begin(), kOptions.end(), [&](const OptionSpec& option) {
    return letter != 0 && option.letter == letter;
  });
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
