#pragma once

#include <string>
#include <vector>

#include <launcher/job.h>
#include <launcher/master.h>

namespace ddp::launcher {

/// The variable that tells rank 0 the number of the socket that it inherits.
inline constexpr const char* kListenFdVariable = "DDP_MASTER_LISTEN_FD";

/// The variable that tells a worker where to leave the text of an error.
inline constexpr const char* kErrorFileVariable = "TORCHELASTIC_ERROR_FILE";

/// Makes the workers' environments: that of the launcher itself, with the variables of the job over
/// it. Variables that a user may set for his own reasons (OMP_NUM_THREADS and the like) are kept.
class WorkerEnvironment {
 public:
  /// `inherited` ends with a null pointer, as `environ`; it and `job` must outlive this object.
  /// `master` is where the workers of this attempt meet.
  WorkerEnvironment(const char* const* inherited, const Job& job, const Master& master,
                    int restart_count);

  /// The environment of one worker as execve wants it; valid until the next call.
  /// `error_file`: TORCHELASTIC_ERROR_FILE; empty: it has none.
  char* const* of(int local_rank, const std::string& error_file = "");

  /// What the launcher has set in the environment that `of` gave last.
  std::vector<std::string> own_variables() const;

 private:
  void set(std::vector<std::string>& to, const char* name, const std::string& value);
  void tune_malloc();

  const Job& job_;
  int listen_fd_;
  std::vector<const char*> kept_;    // what is passed on from the launcher's own environment
  std::vector<std::string> common_;  // the same for all workers
  std::vector<std::string> own_;     // of the worker asked for last
  std::vector<char*> pointers_;
};

/// A new name for this run of a job.
std::string make_run_id();

}  // namespace ddp::launcher
