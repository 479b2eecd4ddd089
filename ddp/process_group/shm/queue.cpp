#include <csignal>
#include <pthread.h>
#include <utility>

#include <fmt/format.h>

#include <ddp/process_group/shm/queue.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {

Queue::Queue(std::unique_ptr<Communicator> ranks)
    : ranks_(std::move(ranks)), collectives_(*ranks_) {}

void Queue::submit(std::shared_ptr<Task> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!thread_.joinable() && !is_stopping_) {
    // Signals are for the program's threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([self = shared_from_this()] { self->work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "ddp-shm");
  } else if (thread_sleeps_ && !is_running_) {
    has_work_.notify_one();
  }
}

void Queue::submit_and_wait(const std::shared_ptr<Task>& task) {
  std::unique_lock lock(mutex_);
  tasks_.push_back(task);
  wait(lock, *task, never());
}

bool Queue::wait(const Task& task, Clock::time_point limit) {
  if (task.is_done()) {
    return true;
  }
  std::unique_lock lock(mutex_);
  return wait(lock, task, limit);
}

bool Queue::wait(std::unique_lock<std::mutex>& lock, const Task& task, Clock::time_point limit) {
  while (!task.is_done() && Clock::now() < limit) {
    if (!is_running_) {
      run_first(lock, limit, Patience::kLong);
    } else {
      ++waiting_;
      changed_.wait_until(lock, limit);
      --waiting_;
    }
  }
  if (!is_running_ && !tasks_.empty() && thread_sleeps_) {
    has_work_.notify_one();
  }
  return task.is_done();
}

void Queue::run_first(std::unique_lock<std::mutex>& lock, Clock::time_point pause,
                      Patience patience) {
  const auto task = tasks_.front();
  is_running_ = true;
  const auto failure = failure_;
  lock.unlock();
  std::exception_ptr error;
  std::string why;
  bool done = true;
  try {
    if (!failure.empty()) {
      throw ShmError(fmt::format("an earlier collective of the group has failed: {}", failure));
    }
    done = run(*task, pause, patience);
  } catch (const std::exception& failed) {
    error = std::current_exception();
    why = failed.what();
    // What the others wait for does not come.
    ranks_->leave();
  }
  lock.lock();
  is_running_ = false;
  if (!why.empty() && failure_.empty()) {
    failure_ = why;
  }
  if (done) {
    tasks_.pop_front();
    task->error_ = error;
    task->done_.store(true, std::memory_order_release);
  }
  if (waiting_ > 0) {
    changed_.notify_all();
  }
  if (done) {
    lock.unlock();
    task->finished();
    lock.lock();
  }
}

bool Queue::run(Task& task, Clock::time_point pause, Patience patience) {
  for (; task.next_ < task.calls_.size(); ++task.next_) {
    if (ranks_->has_left()) {
      throw ShmError("this rank has left the group");
    }
    if (!collectives_.run(task.calls_[task.next_], pause, patience)) {
      return false;
    }
  }
  return true;
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    thread_sleeps_ = true;
    has_work_.wait(lock, [&] { return is_stopping_ || (!is_running_ && !tasks_.empty()); });
    thread_sleeps_ = false;
    if (is_stopping_) {
      drain(lock);
      return;
    }
    run_first(lock, never(), Patience::kShort);
  }
}

void Queue::leave() { ranks_->leave(); }

void Queue::stop() {
  leave();
  std::unique_lock lock(mutex_);
  is_stopping_ = true;
  has_work_.notify_all();
  auto thread = std::move(thread_);
  if (thread.joinable() && thread.get_id() == std::this_thread::get_id()) {
    // The end of a task has dropped the last reference to the group.
    thread.detach();
    return;
  }
  lock.unlock();
  if (thread.joinable()) {
    thread.join();
  }
  lock.lock();
  drain(lock);
}

/// What is left fails, for those who wait for it.
void Queue::drain(std::unique_lock<std::mutex>& lock) {
  while (is_running_ || !tasks_.empty()) {
    if (is_running_) {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    } else {
      run_first(lock, never(), Patience::kShort);
    }
  }
}

}  // namespace ddp::shm
