#include <algorithm>
#include <deque>
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/module_broadcast.h>
#include <ddp/reducer/bucket_assignment.h>
#include <ddp/reducer/watched_wait.h>

namespace ddp::detail {
namespace {

constexpr std::size_t kMessageBytes = std::size_t{250} << 20;
/// Messages in flight; each is a copy of its tensors.
constexpr std::size_t kInFlight = 2;

class Message {
 public:
  Message(c10d::ProcessGroup& group, std::vector<at::Tensor> tensors, int root)
      : tensors_(std::move(tensors)) {
    std::vector<at::Tensor> parts;
    for (const auto& tensor : tensors_) {
      parts.push_back(tensor.contiguous().view({-1}));
    }
    flat_ = {parts.size() == 1 ? parts.front().clone() : at::cat(parts)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    work_ = group.broadcast(flat_, options);
    wait_kind_ = wait_kind(group, flat_.front().device());
  }

  void finish(FailureChannel* channel) {
    if (!watched_wait(*work_, channel, wait_kind_)) {
      throw std::runtime_error("it was aborted");
    }
    std::int64_t offset = 0;
    for (const auto& tensor : tensors_) {
      tensor.copy_(flat_.front().narrow(0, offset, tensor.numel()).view(tensor.sizes()),
                   /*non_blocking=*/true);
      offset += tensor.numel();
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> flat_;
  c10::intrusive_ptr<c10d::Work> work_;
  WaitKind wait_kind_ = WaitKind::kHost;
};

}  // namespace

void broadcast_tensors(c10d::ProcessGroup& group, FailureChannel* channel,
                       const std::vector<at::Tensor>& tensors, int root) {
  const at::NoGradGuard no_grad;
  auto buckets = assign_buckets(tensors, {kMessageBytes});
  std::reverse(buckets.begin(), buckets.end());
  std::deque<Message> in_flight;
  const auto finish_first = [&] {
    in_flight.front().finish(channel);
    in_flight.pop_front();
  };
  for (const auto& bucket : buckets) {
    if (in_flight.size() == kInFlight) {
      finish_first();
    }
    std::vector<at::Tensor> of_bucket;
    for (const auto index : bucket) {
      of_bucket.push_back(tensors[index]);
    }
    in_flight.emplace_back(group, std::move(of_bucket), root);
  }
  while (!in_flight.empty()) {
    finish_first();
  }
}

}  // namespace ddp::detail
