#pragma once

#include <string>
#include <vector>

#include <launcher/master.h>
#include <launcher/options.h>

namespace ddp::launcher {

/// The variable that tells rank 0 the number of the socket that it inherits.
inline constexpr const char* kListenFdVariable = "DDP_MASTER_LISTEN_FD";

/// Makes the workers' environments: that of the launcher itself, with the variables of the job over
/// it. Variables that a user may set for his own reasons (OMP_NUM_THREADS and the like) are kept.
class WorkerEnvironment {
 public:
  /// `inherited` ends with a null pointer, as `environ`; it must outlive this object.
  WorkerEnvironment(const char* const* inherited, const Options& options, const Master& master);

  /// The environment of one worker as execve wants it; valid until the next call.
  char* const* of(int local_rank);

 private:
  void set(std::vector<std::string>& to, const char* name, const std::string& value);

  Options options_;
  int listen_fd_;
  std::vector<const char*> kept_;    // what is passed on from the launcher's own environment
  std::vector<std::string> common_;  // the same for all workers
  std::vector<std::string> own_;     // of the worker asked for last
  std::vector<char*> pointers_;
};

/// A new name for this run of a job.
std::string make_run_id();

}  // namespace ddp::launcher
