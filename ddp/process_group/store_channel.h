#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddp/process_group/store_connection.h>
#include <ddp/reducer/failure_channel.h>
#include <ddp/reducer/unfinished_works.h>

namespace ddp::detail {

/// What the C++ ranks of one group tell each other over the group's store, beside Python's wire
/// protocol: who is a C++ rank, whether their models agree, why one left, and good-byes.
///
/// A Python rank in the same group never announces itself and is never waited for.
/// Every wait is bounded, also where the store's own rank is stopped or dead.
/// Thread-safe.
class StoreChannel final : public FailureChannel {
 public:
  /// `store` is the group's (already prefixed); the channel talks over a connection of its own.
  StoreChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
               std::chrono::milliseconds timeout);

  /// Says that this rank is a C++ rank, and `text` to the other ones. To be called before the
  /// backend connects the ranks.
  void announce(const std::string& text);
  /// Learns which ranks announced themselves. To be called after the backend has connected them.
  void find_members();
  /// For a group made by the program itself: takes every rank for a C++ rank.
  void assume_all_members();
  /// What the ranks said with their announcements, where all of them are members. Throws
  /// CommunicationError where the store does not answer.
  std::vector<std::string> announcements();
  /// Gives `text` to all other ranks and gets theirs, by rank, where all ranks are members. Once
  /// for each `name`; `what` is as for `decide`.
  std::vector<std::string> exchange(const std::string& name, const std::string& text,
                                    const std::string& what);
  /// Says that the backend has connected this rank, and waits until the other members say so: one
  /// that left before would close connections that the others still make. To be called after
  /// `set_process_group`. Throws CommunicationError at the `deadline`, or where a rank leaves.
  void await_connected(std::chrono::steady_clock::time_point deadline);
  /// To be called before this rank throws for a `reason` that the others come to by themselves, or
  /// hear in `await_connected`: waits, at most 5 s, until they have. A rank that left before would
  /// close the store or connections, and they would hear of that instead.
  void refuse(const std::string& reason);
  /// The ranks that have not announced themselves by now; none where the store does not answer.
  std::vector<int> not_announced();
  /// Says that the store goes when this process ends: after a failure it waits a moment for the
  /// others to have read the reports.
  void set_serves_store(bool serves) { serves_store_ = serves; }
  /// The group whose connections `abort` closes.
  void set_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::vector<int>& members() const { return members_; }
  bool all_are_members() const { return static_cast<int>(members_.size()) == world_size_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Decides something on all C++ ranks alike: the lowest of them gets what each contributed (in
  /// the order of `members()`) and its `judge` returns the verdict that every rank then gets.
  /// `what` ends the sentence "rank 1 has not ..." of the CommunicationError that all ranks throw
  /// after the timeout.
  std::string decide(const std::string& name, const std::string& contribution,
                     const std::function<std::string(const std::vector<std::string>&)>& judge,
                     const std::string& what);

  /// A collective whose end no thread waits for: where it fails, `failure()` says so from then on.
  void watch_on_device(const std::string& name, c10d::Work& work);

  /// A number that is the same on all ranks if they all call this in the same order.
  std::uint64_t next_id() { return next_id_++; }

  /// Says that this rank has finished. Never throws.
  void say_goodbye();
  /// Waits until every C++ rank has finished or failed, at most `patience`; returns those that have
  /// not. Never throws.
  std::vector<int> await_goodbyes(std::chrono::milliseconds patience);

  /// Ends the operations in flight and closes the group's connections, without a word to the
  /// others. Never throws.
  void end_operations() override;

  bool all_failed(const std::string& scope, std::uint64_t pass, const std::string& report,
                  std::chrono::milliseconds patience) override;
  void abort(const std::string& report) override;
  void await_readers(std::chrono::milliseconds patience) override;
  std::string reports_of_others(std::chrono::milliseconds patience) override;
  /// What this rank aborted the group with: its own failure, or a failed collective, also one that
  /// is found to have failed on the device.
  std::string failure() const override;
  bool peer_lost() override;

 private:
  std::vector<int> others() const;
  void let_others_read(const std::vector<int>& heard);
  void set(const std::string& key, const std::string& value, std::chrono::milliseconds limit);
  std::string await(const std::string& key, std::chrono::milliseconds patience);
  /// Whether `key` comes within `patience`.
  bool comes(const std::string& key, std::chrono::milliseconds patience);

  StoreConnection connection_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
  std::vector<int> members_;
  bool serves_store_ = false;
  std::uint64_t next_id_ = 0;
  mutable std::mutex mutex_;
  std::string failure_;
  mutable UnfinishedWorks on_device_;
};

}  // namespace ddp::detail
