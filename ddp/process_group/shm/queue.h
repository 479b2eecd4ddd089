#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ddp/process_group/shm/collective.h>
#include <ddp/process_group/shm/communicator.h>

namespace ddp::shm {

/// Calls that are made one after the other, and are done together.
class Task {
 public:
  explicit Task(std::vector<Call> calls) : calls_(std::move(calls)) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  bool is_done() const { return done_.load(std::memory_order_acquire); }
  /// Of one that is done: why it failed, or null.
  const std::exception_ptr& error() const { return error_; }

 private:
  friend class Queue;
  /// Called once, when it is done, on the thread that has done it.
  virtual void finished() noexcept {}

  std::vector<Call> calls_;
  std::size_t next_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

/// Carries tasks out in the order of their submission. A thread that waits for a task carries out
/// what stands before it, and the task itself, where no other does so already; a thread of the
/// queue's own does what nobody waits for. So a task that is waited for at once costs no switch of
/// threads.
///
/// Its owner calls `stop` at the end. Thread-safe.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(std::unique_ptr<Communicator> ranks);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  bool can_reduce(DataType type, Op op) const { return collectives_.can_reduce(type, op); }
  const std::shared_ptr<Arena>& arena() const { return ranks_->shared_arena(); }

  /// Adds a task for the thread of the queue's own, or for whoever waits for it first.
  void submit(std::shared_ptr<Task> task);
  /// Adds a task and waits for it.
  void submit_and_wait(const std::shared_ptr<Task>& task);
  /// Waits until the task is done, or until `limit`: false then, and the task goes on.
  bool wait(const Task& task, Clock::time_point limit);

  /// Leaves the group: all tasks that are not done end with an error, and so do those of other
  /// ranks that need this one.
  void leave();
  /// The same, and ends the thread of the queue's own: at once, or, where it is that thread which
  /// calls this, on its return.
  void stop();

  /// Far enough.
  static Clock::time_point never() { return Clock::now() + kLongest; }

 private:
  bool wait(std::unique_lock<std::mutex>& lock, const Task& task, Clock::time_point limit);
  void run_first(std::unique_lock<std::mutex>& lock, Clock::time_point pause, Patience patience);
  bool run(Task& task, Clock::time_point pause, Patience patience);
  void work();
  void drain(std::unique_lock<std::mutex>& lock);

  const std::unique_ptr<Communicator> ranks_;
  Collectives collectives_;  // used by the thread that has set is_running_
  std::mutex mutex_;
  std::condition_variable has_work_;  // for the queue's own thread
  std::condition_variable changed_;   // for those who wait
  std::deque<std::shared_ptr<Task>> tasks_;
  bool is_running_ = false;
  bool is_stopping_ = false;
  bool thread_sleeps_ = false;
  int waiting_ = 0;
  std::string failure_;
  std::thread thread_;
};

}  // namespace ddp::shm
