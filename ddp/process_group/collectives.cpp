#include <ddp/process_group/collectives.h>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/error_text.h>
#include <ddp/process_group/group_registry.h>

namespace ddp {
namespace {

void check_tensor(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined()) {
    throw UsageError(fmt::format("{}: the tensor is undefined", name));
  }
  if (tensor.layout() != c10::kStrided || !tensor.is_non_overlapping_and_dense()) {
    throw UsageError(fmt::format("{}: the tensor is not dense and contiguous; pass tensor.contiguous()", name));
  }
}

void check_rank(const ProcessGroup& group, int rank, const char* name, const char* argument) {
  if (rank < 0 || rank >= group->getSize()) {
    throw UsageError(fmt::format("{}: {} is {}; the group has the ranks 0 to {}", name, argument, rank,
                                 group->getSize() - 1));
  }
}

/// Starts a collective, and waits for it unless it is asynchronous.
template <class Start>
Work run(const ProcessGroup& group, const char* name, bool async_op, Start start) {
  auto channel = detail::channel_of(group);
  if (channel->failed()) {
    throw CommunicationError(
        fmt::format("rank {}: {}: the group failed earlier; destroy it with ddp::destroy_process_group()",
                    group->getRank(), name));
  }
  c10::intrusive_ptr<c10d::Work> started;
  try {
    started = start();
  } catch (const std::exception& error) {
    // Refused before anything was sent: the group is intact.
    throw UsageError(fmt::format("rank {}: {}: {}", group->getRank(), name, detail::concise(error)));
  }
  Work work(std::move(started), std::move(channel), name);
  if (!async_op) {
    work.wait();
  }
  return work;
}

}  // namespace

Work all_reduce(const at::Tensor& tensor, const AllReduceOptions& options, const ProcessGroup& group_or_default) {
  const auto group = detail::resolve_group(group_or_default);
  check_tensor(tensor, "all_reduce");
  return run(group, "all_reduce", options.async_op(), [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions native;
    native.reduceOp = options.op();
    return group->allreduce(tensors, native);
  });
}

Work broadcast(const at::Tensor& tensor, const BroadcastOptions& options, const ProcessGroup& group_or_default) {
  const auto group = detail::resolve_group(group_or_default);
  check_tensor(tensor, "broadcast");
  check_rank(group, options.src(), "broadcast", "src");
  return run(group, "broadcast", options.async_op(), [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions native;
    native.rootRank = options.src();
    return group->broadcast(tensors, native);
  });
}

void barrier(const ProcessGroup& group_or_default) {
  const auto group = detail::resolve_group(group_or_default);
  run(group, "barrier", /*async_op=*/false, [&] { return group->barrier(); });
}

}  // namespace ddp
