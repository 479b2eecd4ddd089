#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <ddp/reducer/watched_wait.h>

// Note [Watched waits]
// ~~~~~~~~~~~~~~~~~~~~
// Gloo tells an operation of a closed connection only while that operation stands in the
// connection's own list of what it waits for. Two cases fall through, and then wait for the whole
// timeout of the group:
// - A connection comes to a message for an operation that has failed meanwhile (on another
//   connection). Nobody wants that message, so it stays at the front, and with it everything
//   behind, the end of the stream included; the other operations on that connection go on waiting.
// - A peer dies in the middle of a message. Its receiver has left the list when the message began.
// So a wait looks every now and then whether a rank is gone. Where one is, it gives the backend one
// more turn to say so itself, since it knows more; then it ends the operations in flight. Where
// even this does not end the second case, the wait gives up.
//
// Where a stream waits (WaitKind::kStream) nothing of this is done: the thread goes on at once, and
// a wait with a limit would block it, and abort NCCL's communicator at that limit. How the work
// ended is learned from UnfinishedWorks.

namespace ddp::detail {
namespace {

constexpr std::chrono::milliseconds kTurn(500);

/// `wait` waits for at most the given time, and returns whether it is done.
template <class Wait>
void watch(const Wait& wait, FailureChannel& channel) {
  while (!wait(kTurn)) {
    if (!channel.peer_lost() || wait(kTurn) || !channel.peer_lost()) {
      continue;
    }
    channel.end_operations();
    if (!wait(kTurn)) {
      throw std::runtime_error("a rank that takes part in it has left");
    }
    return;
  }
}

}  // namespace

bool watched_wait(c10d::Work& work, FailureChannel* channel, WaitKind kind) {
  if (channel == nullptr || kind == WaitKind::kStream) {
    return work.wait();
  }
  bool success = false;
  watch(
      [&](std::chrono::milliseconds turn) {
        try {
          success = work.wait(turn);
          return true;
        } catch (const std::exception&) {
          if (work.isCompleted()) {
            throw;
          }
          return false;
        }
      },
      *channel);
  return success;
}

bool watched_wait_apart(const c10::intrusive_ptr<c10d::Work>& work,
                        const std::shared_ptr<FailureChannel>& channel) {
  std::packaged_task<bool()> wait([work] { return work->wait(); });
  auto success = wait.get_future();
  std::thread(std::move(wait)).detach();
  watch(
      [&](std::chrono::milliseconds turn) {
        return success.wait_for(turn) == std::future_status::ready;
      },
      *channel);
  return success.get();
}

void watched_wait(c10::ivalue::Future& future, FailureChannel* channel) {
  if (channel == nullptr) {
    future.wait();
    return;
  }
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto completion = std::make_shared<Completion>();
  future.addCallback(
      [completion](c10::ivalue::Future&) {
        const std::lock_guard lock(completion->mutex);
        completion->done = true;
        completion->changed.notify_all();
      },
      /*uses_future=*/false);
  watch(
      [&](std::chrono::milliseconds turn) {
        std::unique_lock lock(completion->mutex);
        return completion->changed.wait_for(lock, turn, [&] { return completion->done; });
      },
      *channel);
  // Of a future that is complete, this makes the device's current stream wait.
  future.wait();
}

}  // namespace ddp::detail
