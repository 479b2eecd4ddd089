#include <chrono>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/comm_hooks/hook_worker.h>

namespace ddp::comm_hooks::detail {
namespace {

constexpr std::chrono::milliseconds kTurn(500);
constexpr const char* kStopped = "the communication hook was destroyed while it ran";

void complete(c10::ivalue::Future& future, const HookWorker::Job& job) {
  const at::NoGradGuard no_grad;
  try {
    future.markCompleted(job());
  } catch (...) {
    future.setError(std::current_exception());
  }
}

}  // namespace

HookWorker::~HookWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  for (const auto& entry : queue_) {
    entry.future->setError(std::make_exception_ptr(std::runtime_error(kStopped)));
  }
}

FuturePtr HookWorker::run(const at::Tensor& buffer, Job job) {
  if (!buffer.is_cpu()) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(), std::vector<c10::Device>{buffer.device()});
    runs_at_once_ = true;
    complete(*future, job);
    return future;
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(job), future});
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
  }
  changed_.notify_all();
  return future;
}

void HookWorker::work() {
  while (true) {
    Entry entry;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) {
        return;
      }
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    complete(*entry.future, entry.job);
  }
}

bool HookWorker::is_stopping() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

void HookWorker::wait(c10d::Work& work) {
  if (runs_at_once_) {
    // The device's stream waits; with a limit, this thread would.
    if (!work.wait()) {
      throw std::runtime_error("a collective was aborted");
    }
    return;
  }
  while (!is_stopping()) {
    try {
      if (!work.wait(kTurn)) {
        throw std::runtime_error("a collective was aborted");
      }
      return;
    } catch (const std::exception&) {
      // A turn that passed in vain throws too.
      if (work.isCompleted()) {
        throw;
      }
    }
  }
  throw std::runtime_error(kStopped);
}

}  // namespace ddp::comm_hooks::detail
