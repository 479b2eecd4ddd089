#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <launcher/elastic/elastic_options.h>
#include <launcher/local_ranks.h>
#include <launcher/numa.h>
#include <launcher/placement.h>
#include <launcher/variables.h>

namespace ddp::launcher {

/// What the command line and the environment ask for, checked.
struct Options {
  int nnodes = 1;  ///< elastic: at most
  int node_rank = 0;
  int nproc_per_node = 1;
  std::string master_addr;                               ///< empty: not given
  int master_port = 0;                                   ///< 0: not given
  std::optional<std::chrono::seconds> resolve_patience;  ///< for the master's name
  std::optional<ElasticOptions> elastic;                 ///< c10d with several nodes
  std::string local_addr;                                ///< empty: the machine's name
  std::string run_id;                                    ///< empty: not given

  bool use_env = false;  ///< no argument --local_rank=N for the program
  bool module = false;
  bool no_python = false;
  bool run_path = false;
  std::string role = "default";
  bool virtual_local_rank = false;
  bool tune_malloc = false;
  NumaBinding numa_binding = NumaBinding::kNone;

  std::string log_dir;  ///< empty: no files
  StreamMask redirects;
  StreamMask tee;
  std::string line_prefix;               ///< a template; empty: no prefixes
  bool prefix_all = false;               ///< also what is not tee'd
  std::optional<std::set<int>> visible;  ///< local ranks that are shown; all where it is not given

  int max_restarts = 0;
  std::chrono::milliseconds grace_period{30000};
  std::optional<std::chrono::milliseconds> timeout;
  std::set<int> ending_signals;  ///< passed to the workers, and the job ends

  bool dry_run = false;
  bool help = false;     ///< nothing else is checked then
  bool version = false;  ///< nothing else is checked then
  std::vector<std::string> command;

  Options();

  /// Where this node stands, if the job is not elastic.
  Placement placement() const {
    return {node_rank, nnodes, node_rank * nproc_per_node, nnodes * nproc_per_node};
  }
};

/// Reads a whole command line (argv[0] included, for the name that the launcher was called by:
/// as `ddprun` it leaves the rank to the environment), behind it the PET_* variables, and behind
/// them those of the batch system. Throws Error with the usage status.
Options parse_options(std::span<const char* const> argv, const VariableLookup& variables);

}  // namespace ddp::launcher
