#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/reducer/device_backend.h>

namespace ddp {

namespace detail {
class StoreChannel;
}  // namespace detail

/// A collective in flight, or finished. What a collective with `async_op(true)` returns; the
/// tensors given to it must not be touched, nor freed, before `wait()` has returned. Copies share
/// the work.
///
/// Thread safety: as the c10d work behind it; one thread waits.
///
///     auto work = ddp::all_reduce(tensor, ddp::AllReduceOptions().async_op(true));
///     // ... something else ...
///     work.wait();
class Work {
 public:
  /// A work that is done.
  Work() = default;
  /// `finish` runs in the first `wait()` that succeeds.
  Work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<detail::StoreChannel> channel,
       std::string name, std::function<void()> finish = {},
       detail::WaitKind wait_kind = detail::WaitKind::kHost);

  /// Blocks until the collective is done; over NCCL the device's current stream waits for it, this
  /// thread does not, and a failure is thrown by the next call on the group. Throws
  /// CommunicationError, which names the collective and what is known of the other ranks; the group
  /// is not usable after that.
  void wait();

  /// Whether `wait()` would return at once (or throw at once).
  bool is_completed() const;

  /// After the `wait()` of a `recv`: the rank in the group that sent.
  int source_rank() const;

  /// The c10d work; null for a default-constructed one.
  const c10::intrusive_ptr<c10d::Work>& get() const { return work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::shared_ptr<detail::StoreChannel> channel_;
  std::string name_;
  std::shared_ptr<std::function<void()>> finish_;
  detail::WaitKind wait_kind_ = detail::WaitKind::kHost;
};

}  // namespace ddp
