#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <ddp/reducer/failure_channel.h>

namespace ddp::test {

/// One all-reduce of the fake group: done when somebody completes it.
class FakeWork : public c10d::Work {
 public:
  FakeWork(at::Tensor values, std::function<void()> on_wait)
      : c10d::Work(0, c10d::OpType::ALLREDUCE),
        tensor(std::move(values)),
        on_wait_(std::move(on_wait)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    on_wait_();
    return c10d::Work::wait(timeout);
  }
  void succeed() { finish(); }
  void fail(const std::string& text) { finish(std::make_exception_ptr(std::runtime_error(text))); }
  bool is_done() { return isCompleted(); }

  at::Tensor tensor;

 private:
  std::function<void()> on_wait_;
};

/// A process group in one process, for the logic of the reducer alone: its all-reduces change their
/// tensors only when they complete, which the test decides: at once, or when the first of them is
/// waited for, and then in the order that the test names.
class FakeProcessGroup : public c10d::ProcessGroup {
 public:
  explicit FakeProcessGroup(int size, int rank = 0) : c10d::ProcessGroup(rank, size) {}

  const std::string getBackendName() const override { return "fake"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    if (refuse) {
      throw std::runtime_error("refused");
    }
    auto work = c10::make_intrusive<FakeWork>(tensors.front(), [this] { complete_outstanding(); });
    works.push_back(work);
    sent.push_back(tensors.front().clone());
    if (!late) {
      complete(works.size() - 1);
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& /*options*/) override {
    ++broadcasts;
    if (on_broadcast) {
      on_broadcast(tensors.front());
    }
    auto work = c10::make_intrusive<FakeWork>(tensors.front(), [] {});
    work->succeed();
    return work;
  }

  void abort() override { aborted = true; }

  void complete(std::size_t index) {
    auto& work = works[index];
    if (work->is_done()) {
      return;
    }
    if (fail_at == static_cast<int>(index)) {
      work->fail("the cable was cut");
      return;
    }
    at::NoGradGuard no_grad;
    reduce(work->tensor);
    work->succeed();
  }

  /// What the all-reduce makes of this rank's values. Default: all ranks have the same.
  std::function<void(at::Tensor&)> reduce = [this](at::Tensor& tensor) { tensor.mul_(getSize()); };
  std::function<void(at::Tensor&)> on_broadcast;
  bool late = false;
  bool reversed = false;
  bool refuse = false;
  int fail_at = -1;
  std::vector<c10::intrusive_ptr<FakeWork>> works;
  std::vector<at::Tensor> sent;  // as they were when launched
  int broadcasts = 0;
  bool aborted = false;

 private:
  void complete_outstanding() {
    for (std::size_t i = 0; i < works.size(); ++i) {
      complete(reversed ? works.size() - 1 - i : i);
    }
  }
};

/// A failure channel whose answer the test decides.
class FakeChannel : public FailureChannel {
 public:
  bool all_failed(const std::string& /*scope*/, std::uint64_t pass, const std::string& report,
                  std::chrono::milliseconds /*patience*/) override {
    failed_passes.push_back(pass);
    reports.push_back(report);
    return others_failed_too;
  }
  void abort(const std::string& report) override {
    aborted = true;
    reports.push_back(report);
  }
  void await_readers(std::chrono::milliseconds /*patience*/) override {}
  std::string reports_of_others(std::chrono::milliseconds /*patience*/) override {
    return "\n  rank 1 left: bored";
  }
  std::string failure() const override { return aborted ? reports.back() : ""; }
  bool peer_lost() override { return lost; }
  void end_operations() override {
    ++ended_operations;
    if (on_end_operations) {
      on_end_operations();
    }
  }

  bool others_failed_too = true;
  bool aborted = false;
  bool lost = false;
  int ended_operations = 0;
  std::function<void()> on_end_operations;
  std::vector<std::uint64_t> failed_passes;
  std::vector<std::string> reports;
};

}  // namespace ddp::test
