#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include <ddp/process_group/shm/arena.h>

namespace ddp::shm {

/// What a rank tells the others of its process, so that they can open its memory.
struct Offer {
  /// The machine as it has been started, and the name space of process numbers in it: only within
  /// one can `pid` be found.
  std::string machine;
  uid_t user = 0;
  pid_t pid = 0;
  int mailbox_fd = -1;
  std::uint64_t cookie = 0;
  /// The processors that the process may run on, ascending.
  std::vector<int> processors;

  /// This process's. Throws ShmError where the system does not tell.
  static Offer of_this_process(const Arena& arena);

  std::string text() const;
  static std::optional<Offer> parse(const std::string& text);
};

/// How many processors all of them together may run on.
int count_processors(const std::vector<Offer>& offers);

}  // namespace ddp::shm
