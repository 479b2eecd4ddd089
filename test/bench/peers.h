#pragma once

#include <functional>
#include <string>
#include <test/bench/workloads.h>

namespace ddp::bench {

/// One way to train a workload on several ranks.
struct Peer {
  /// In place of the model's own forward.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  /// Between backward and the optimizer's step.
  std::function<void()> after_backward = [] {};
  /// In place of a whole step, where there is one.
  std::function<void()> step = nullptr;
};

/// bare (no communication); hand_written and hand_written_async (what C++ programs do today: each
/// gradient is all-reduced after backward, one after the other or all at once); c10d_reducer (what
/// LibTorch exports, driven as Python's DDP drives it, with bucket views); ours, ours_bucket_view
/// (over Gloo); ours_default (the default backend, bucket views); ours_fp16 (over Gloo, bucket
/// views, fp16_compress); forward (the forward alone); communication (all-reduces of 25 MB, as many
/// bytes as the gradients have, over Gloo). All but bare and forward join the default group. Throws
/// std::invalid_argument for another name.
Peer make_peer(const std::string& name, const Workload& work);

}  // namespace ddp::bench
