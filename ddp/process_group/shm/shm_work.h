#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/process_group/shm/queue.h>

namespace ddp::shm {

/// A task over tensors, which it keeps alive, and the future of its outputs.
class TensorTask final : public Task {
 public:
  TensorTask(std::vector<Call> calls, std::vector<at::Tensor> inputs,
             std::vector<at::Tensor> outputs)
      : Task(std::move(calls)), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  /// Made when first asked for.
  c10::intrusive_ptr<c10::ivalue::Future> future();

 private:
  void finished() noexcept override;
  void complete(c10::ivalue::Future& future) const;

  const std::vector<at::Tensor> inputs_;
  const std::vector<at::Tensor> outputs_;
  std::mutex mutex_;
  bool is_finished_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A collective over shared memory, as c10d sees it. Whoever waits for it carries it out, where no
/// other thread does so already.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<Queue> queue, std::shared_ptr<TensorTask> task, int rank,
          c10d::OpType type, std::uint64_t number)
      : Work(rank, type), queue_(std::move(queue)), task_(std::move(task)), number_(number) {}

  bool isCompleted() override { return task_->is_done(); }
  bool isSuccess() const override { return task_->is_done() && !task_->error(); }
  std::exception_ptr exception() const override {
    return task_->is_done() ? task_->error() : nullptr;
  }
  std::vector<at::Tensor> result() override { return task_->outputs(); }
  void synchronize() override {}
  /// Throws ShmError where the collective has failed, and c10::Error where it is not done after
  /// `timeout`: it then goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  /// Leaves the group: a collective cannot be ended alone.
  void abort() override { queue_->leave(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return task_->future(); }
  std::uint64_t getSequencenumber() const override { return number_; }

 private:
  const std::shared_ptr<Queue> queue_;
  const std::shared_ptr<TensorTask> task_;
  const std::uint64_t number_;
};

}  // namespace ddp::shm
