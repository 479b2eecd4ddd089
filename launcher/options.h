#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

namespace ddp::launcher {

/// What the command line asks for, checked.
struct Options {
  int nnodes = 1;
  int node_rank = 0;
  int nproc_per_node = 1;
  std::string master_addr;  ///< empty: not given
  int master_port = 0;      ///< 0: not given
  bool use_env = false;     ///< no argument --local_rank=N for the program
  std::chrono::milliseconds grace_period{30000};
  bool help = false;     ///< nothing else is checked then
  bool version = false;  ///< nothing else is checked then
  std::vector<std::string> command;

  int world_size() const { return nnodes * nproc_per_node; }
  int rank(int local_rank) const { return node_rank * nproc_per_node + local_rank; }
};

/// Reads a whole command line (argv[0] included, for the name that the launcher was called by:
/// as `ddprun` it leaves the rank to the environment). Throws Error with the usage status.
Options parse_options(std::span<const char* const> argv);

/// The text of `--help`.
std::string help_text();

}  // namespace ddp::launcher
