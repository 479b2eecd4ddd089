#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <ddp/process_group/process_group.h>
#include <ddp/process_group/reduce_op.h>
#include <ddp/process_group/store_channel.h>
#include <ddp/process_group/work.h>
#include <ddp/reducer/device_backend.h>

namespace ddp::detail {

/// One call of a collective: its group, what it refuses before anything is sent, and its start.
/// All refusals are UsageErrors that name the rank and the function; the group stays intact.
class CollectiveCall {
 public:
  CollectiveCall(const ProcessGroup& group_or_default, const char* name);

  c10d::ProcessGroup& group() const { return *group_; }
  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }

  [[noreturn]] void refuse(const std::string& why) const;
  /// That `rank` is one of the group's. `argument` is its name in the options.
  void check_rank(int rank, const char* argument) const;
  /// That `tensors` has one for each rank.
  void check_count(const std::vector<at::Tensor>& tensors, const char* argument) const;
  /// That `tensor` has the dtype of `other`, and `numel` elements.
  void check_like(const at::Tensor& tensor, const char* argument, const at::Tensor& other,
                  const char* other_argument, std::int64_t numel) const;

  /// `tensor` as the backend can move it: itself, or for a dtype that the backend does not know an
  /// alias over the same bytes. Refuses an undefined, sparse or non-contiguous one.
  at::Tensor to_move(const at::Tensor& tensor, const char* argument = "the tensor") const;
  std::vector<at::Tensor> to_move(const std::vector<at::Tensor>& tensors,
                                  const char* argument) const;
  /// The same for a tensor that is only moved or reduced whole, on all ranks with the same strides:
  /// dense is enough.
  at::Tensor to_move_dense(const at::Tensor& tensor) const;
  /// `tensor` as the backend can reduce it; refuses a dtype that it cannot. `op` may be replaced by
  /// one that means the same (for bool).
  at::Tensor to_reduce(const at::Tensor& tensor, ReduceOp* op,
                       const char* argument = "the tensor") const;
  at::Tensor to_reduce_dense(const at::Tensor& tensor, ReduceOp* op) const;

  /// Whether the backend starts the collective on `tensor` as an asynchronous one: also where the
  /// program waits, on a device whose streams wait. (NCCL runs a synchronous one on the current
  /// stream, and then nobody looks for its failure.)
  bool is_async(bool async_op, const at::Tensor& tensor) const;

  /// Starts the collective, and waits for it unless it is asynchronous. `finish` runs at the end of
  /// the wait.
  Work run(bool async_op, const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
           std::function<void()> finish = {}) const;

 private:
  void check_tensor(const at::Tensor& tensor, const char* argument, bool contiguous) const;
  at::Tensor movable(const at::Tensor& tensor) const;
  at::Tensor reducible(const at::Tensor& tensor, ReduceOp* op, const char* argument) const;

  ProcessGroup group_;
  std::shared_ptr<StoreChannel> channel_;
  const char* name_;
  mutable WaitKind wait_kind_ = WaitKind::kHost;  // of the tensors that were looked at
};

}  // namespace ddp::detail
