#pragma once

#include <memory>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/reducer/device_backend.h>
#include <ddp/reducer/failure_channel.h>

namespace ddp::detail {

/// Waits for a collective of all ranks, as `kind` says: the thread until it is done, or the
/// device's current stream, and the thread not at all. See Note [Watched waits].
///
/// `channel` may be null: a plain wait. False: the work was aborted. Throws what the work throws,
/// and std::runtime_error where a rank is gone and the backend did not notice.
bool watched_wait(c10d::Work& work, FailureChannel* channel, WaitKind kind);

/// The same for a send or receive, whose `wait` with a limit would end all others of the group at
/// that limit: it waits in a thread of its own.
bool watched_wait_apart(const c10::intrusive_ptr<c10d::Work>& work,
                        const std::shared_ptr<FailureChannel>& channel);

/// The same for what a communication hook returned. Returns also where the future holds an error.
void watched_wait(c10::ivalue::Future& future, FailureChannel* channel);

}  // namespace ddp::detail
