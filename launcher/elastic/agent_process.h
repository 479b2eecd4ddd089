#pragma once

#include <sys/types.h>

#include <utility>

#include <launcher/job.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// The process of this node's agent, see Note [Agent]; none where the job is not elastic. It is a
/// child of the process that makes this object.
class AgentProcess {
 public:
  /// `argc` and `argv` are main's. Throws Error.
  AgentProcess(const Job& job, int argc, char** argv);

  /// For the child that becomes the guardian: the socket to the agent; nothing where there is none.
  UniqueFd take_link() { return std::move(link_); }

  /// For the front, once the guardian has been started.
  void drop_link() { link_.reset(); }

  pid_t pid() const { return pid_; }  ///< 0: none

  /// Waits until it has ended, which it does once the guardian has; after a while it is killed.
  void await_end() const;

 private:
  UniqueFd link_;
  pid_t pid_ = 0;
};

}  // namespace ddp::launcher
