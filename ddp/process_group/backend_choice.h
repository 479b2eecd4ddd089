#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/process_group/backend_names.h>
#include <ddp/process_group/shm/communicator.h>
#include <ddp/process_group/store_channel.h>

namespace ddp::detail {

/// Whether the ranks of a group communicate through shared memory or over Gloo. Each rank says what
/// it wishes and can with its announcement on the store, so that all of them know the same and come
/// to the same decision.
///
/// "gloo" is Gloo. "" is shared memory where all ranks are on one machine and can, else Gloo. "shm"
/// is shared memory, or an error on every rank.
class BackendChoice {
 public:
  /// `ranks`: the group's, as ranks of the default group; `rank`: this one, in the group.
  BackendChoice(const BackendNames& wish, int rank, std::vector<int> ranks);

  /// What this rank's announcement says.
  std::string announcement() const;

  /// To be called when all ranks have announced themselves. The group's ranks, connected through
  /// shared memory; null for Gloo. Then `reason()` says why, where that is worth a word. Throws
  /// UsageError where a rank asks for "shm" and it cannot be, CommunicationError where a rank does
  /// not answer.
  std::unique_ptr<shm::Communicator> decide(StoreChannel& channel);
  const std::string& reason() const { return reason_; }

  /// Of a rank that takes NCCL for CUDA tensors: throws UsageError that names the ranks that do
  /// not, which would wait for each other in different collectives.
  void check_all_take_nccl(StoreChannel& channel) const;

 private:
  bool refuse(const std::string& reason, bool is_surprise);
  std::optional<std::vector<shm::Offer>> offers_of_all(const std::vector<std::string>& all);
  std::string rank_name(std::size_t rank) const;

  const std::string wish_;
  const bool nccl_;
  const int rank_;
  const std::vector<int> ranks_;
  std::shared_ptr<shm::Arena> arena_;
  std::string own_;
  std::string reason_;
};

}  // namespace ddp::detail
