#pragma once

#include <string>
#include <vector>

#include <launcher/options.h>

namespace ddp::launcher {

/// What a worker executes.
struct Command {
  std::string path;                ///< the file that is executed
  std::vector<std::string> words;  ///< argv, without the rank's argument
  std::string rank_option;         ///< "--local_rank="; empty: there is no such argument
  size_t rank_at = 0;              ///< the place in argv of the rank's argument

  /// argv for one worker.
  std::vector<std::string> for_rank(int local_rank) const;
};

/// The program itself, or Python with the script or module. Python is PYTHON_EXEC, else python3;
/// it gets --local-rank=N as torch.distributed.launch spells it, a program --local_rank=N.
/// Throws Error where there is no such program or script, or it cannot be run.
Command make_command(const Options& options, const VariableLookup& variables);

}  // namespace ddp::launcher
