#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <ddp/process_group/shm/shm_backend.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

DataType type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DataType::kFloat;
    case at::kDouble:
      return DataType::kDouble;
    case at::kHalf:
      return DataType::kHalf;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kChar:
      return DataType::kInt8;
    case at::kByte:
      return DataType::kUint8;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kBool:
      return DataType::kBool;
    default:
      return DataType::kOther;
  }
}

std::optional<Op> op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Op::kSum;
    case c10d::ReduceOp::AVG:
      return Op::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return Op::kProduct;
    case c10d::ReduceOp::MIN:
      return Op::kMin;
    case c10d::ReduceOp::MAX:
      return Op::kMax;
    case c10d::ReduceOp::BAND:
      return Op::kBitAnd;
    case c10d::ReduceOp::BOR:
      return Op::kBitOr;
    case c10d::ReduceOp::BXOR:
      return Op::kBitXor;
    default:
      return std::nullopt;
  }
}

/// Whether its elements are a piece of this process's memory without gaps.
bool is_dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.is_quantized() && tensor.is_non_overlapping_and_dense();
}

bool is_contiguous(const at::Tensor& tensor) { return is_dense(tensor) && tensor.is_contiguous(); }

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

/// A call that only moves `tensor`.
Call movement(Kind kind, const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  Call call;
  call.kind = kind;
  call.type = type_of(tensor);
  call.count =
      static_cast<std::size_t>(call.type == DataType::kOther ? tensor.nbytes() : tensor.numel());
  call.data = data_of(tensor);
  call.timeout = timeout;
  return call;
}

/// Whether all of `tensors` are contiguous, and like `one`.
bool are_like(const std::vector<at::Tensor>& tensors, const at::Tensor& one, int count) {
  return static_cast<int>(tensors.size()) == count && is_contiguous(one) &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return is_contiguous(tensor) && tensor.scalar_type() == one.scalar_type() &&
                  tensor.numel() == one.numel();
         });
}

/// Whether `all` has `size` times what `one` has.
bool is_multiple(const at::Tensor& all, const at::Tensor& one, int size) {
  return is_contiguous(all) && is_contiguous(one) && all.scalar_type() == one.scalar_type() &&
         all.numel() == one.numel() * size;
}

}  // namespace

ShmBackend::ShmBackend(int rank, std::unique_ptr<Communicator> ranks,
                       const c10::intrusive_ptr<c10d::Backend>& gloo,
                       std::chrono::milliseconds timeout)
    : Backend(rank, ranks->size()),
      gloo_(gloo),
      queue_(std::make_shared<Queue>(std::move(ranks))),
      timeout_(timeout) {}

ShmBackend::~ShmBackend() { queue_->stop(); }

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  gloo_->setTimeout(timeout);
}

void ShmBackend::abort() {
  queue_->leave();
  gloo_->abort();
}

int ShmBackend::peers_gone() const {
  const auto* connected = dynamic_cast<const ddp::detail::Connected*>(gloo_.get());
  return connected != nullptr ? connected->peers_gone() : 0;
}

// ---- Memory ----

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes <= kInlineBytes) {
    return at::empty({size}, options);
  }
  const auto arena = queue_->arena();
  std::byte* data = nullptr;
  try {
    data = arena->allocate(bytes);
  } catch (const ShmError& error) {
    TORCH_CHECK(false, error.what());
  }
  return at::from_blob(
      data, {size}, [arena](void* memory) { arena->release(memory); }, options);
}

bool ShmBackend::supportsTensorAlloc(c10::DeviceIndex) { return true; }

// ---- Calls ----

std::chrono::milliseconds ShmBackend::bound(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

bool ShmBackend::can_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  const auto known = op_of(op);
  return is_dense(tensor) && known && queue_->can_reduce(type_of(tensor), *known);
}

Call ShmBackend::reduction(Kind kind, const at::Tensor& tensor, const c10d::ReduceOp& op,
                           std::chrono::milliseconds timeout) const {
  auto call = movement(kind, tensor, bound(timeout));
  call.op = *op_of(op);
  return call;
}

WorkPtr ShmBackend::start(OpType type, std::vector<Call> calls, std::vector<at::Tensor> inputs,
                          std::vector<at::Tensor> outputs, bool async) {
  auto task = std::make_shared<TensorTask>(std::move(calls), std::move(inputs), std::move(outputs));
  auto work = c10::make_intrusive<ShmWork>(queue_, task, rank_, type, ++calls_);
  if (async) {
    queue_->submit(std::move(task));
  } else {
    queue_->submit_and_wait(task);
  }
  return work;
}

WorkPtr ShmBackend::allreduce(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !can_reduce(tensors[0], options.reduceOp)) {
    return gloo_->allreduce(tensors, options);
  }
  return start(OpType::ALLREDUCE,
               {reduction(Kind::kAllReduce, tensors[0], options.reduceOp, options.timeout)}, {},
               tensors, options.asyncOp);
}

WorkPtr ShmBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                        const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Call> calls;
  for (const auto& tensor : tensors) {
    if (!can_reduce(tensor, options.reduceOp)) {
      return gloo_->allreduce_coalesced(tensors, options);
    }
    calls.push_back(reduction(Kind::kAllReduce, tensor, options.reduceOp, options.timeout));
  }
  return start(OpType::ALLREDUCE_COALESCED, std::move(calls), {}, tensors, options.asyncOp);
}

WorkPtr ShmBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  if (tensors.size() != 1 || options.rootTensor != 0 || options.rootRank < 0 ||
      options.rootRank >= size_ || !can_reduce(tensors[0], options.reduceOp)) {
    return gloo_->reduce(tensors, options);
  }
  auto call = reduction(Kind::kReduce, tensors[0], options.reduceOp, options.timeout);
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::REDUCE, {std::move(call)}, {}, tensors, options.asyncOp);
}

WorkPtr ShmBackend::broadcast(std::vector<at::Tensor>& tensors,
                              const c10d::BroadcastOptions& options) {
  if (tensors.size() != 1 || options.rootTensor != 0 || options.rootRank < 0 ||
      options.rootRank >= size_ || !is_dense(tensors[0])) {
    return gloo_->broadcast(tensors, options);
  }
  auto call = movement(Kind::kBroadcast, tensors[0], bound(options.timeout));
  call.root = static_cast<int>(options.rootRank);
  return start(OpType::BROADCAST, {std::move(call)}, {}, tensors, options.asyncOp);
}

WorkPtr ShmBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1 || !are_like(outputs[0], inputs[0], size_)) {
    return gloo_->allgather(outputs, inputs, options);
  }
  auto call = movement(Kind::kAllGather, inputs[0], bound(options.timeout));
  for (const auto& output : outputs[0]) {
    call.pieces.push_back(data_of(output));
  }
  return start(OpType::ALLGATHER, {std::move(call)}, inputs, outputs[0], options.asyncOp);
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions& options) {
  if (!is_multiple(output, input, size_)) {
    return gloo_->_allgather_base(output, input, options);
  }
  auto call = movement(Kind::kAllGather, input, bound(options.timeout));
  for (int rank = 0; rank < size_; ++rank) {
    call.pieces.push_back(data_of(output) + static_cast<std::size_t>(rank) * input.nbytes());
  }
  return start(OpType::_ALLGATHER_BASE, {std::move(call)}, {input}, {output}, options.asyncOp);
}

WorkPtr ShmBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                   std::vector<std::vector<at::Tensor>>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1 || !are_like(inputs[0], outputs[0], size_) ||
      !can_reduce(outputs[0], options.reduceOp)) {
    return gloo_->reduce_scatter(outputs, inputs, options);
  }
  auto call = reduction(Kind::kReduceScatter, outputs[0], options.reduceOp, options.timeout);
  call.output = std::exchange(call.data, nullptr);
  for (const auto& input : inputs[0]) {
    call.pieces.push_back(data_of(input));
  }
  return start(OpType::REDUCE_SCATTER, {std::move(call)}, inputs[0], outputs, options.asyncOp);
}

WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  if (!is_multiple(input, output, size_) || !can_reduce(output, options.reduceOp)) {
    return gloo_->_reduce_scatter_base(output, input, options);
  }
  auto call = reduction(Kind::kReduceScatter, output, options.reduceOp, options.timeout);
  call.output = std::exchange(call.data, data_of(input));
  return start(OpType::_REDUCE_SCATTER_BASE, {std::move(call)}, {input}, {output}, options.asyncOp);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Call call;
  call.timeout = bound(options.timeout);
  return start(OpType::BARRIER, {std::move(call)}, {}, {}, options.asyncOp);
}

// ---- Gloo's ----

WorkPtr ShmBackend::allreduce_sparse(std::vector<at::Tensor>& tensors,
                                     const c10d::AllreduceOptions& options) {
  return gloo_->allreduce_sparse(tensors, options);
}

WorkPtr ShmBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::AllgatherOptions& options) {
  return gloo_->allgather_coalesced(outputs, inputs, options);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                    std::vector<at::Tensor>& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return gloo_->allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                    std::vector<at::Tensor>& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  return gloo_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ShmBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                           std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) {
  return gloo_->gather(outputs, inputs, options);
}

WorkPtr ShmBackend::scatter(std::vector<at::Tensor>& outputs,
                            std::vector<std::vector<at::Tensor>>& inputs,
                            const c10d::ScatterOptions& options) {
  return gloo_->scatter(outputs, inputs, options);
}

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                  std::vector<std::int64_t>& output_sizes,
                                  std::vector<std::int64_t>& input_sizes,
                                  const c10d::AllToAllOptions& options) {
  return gloo_->alltoall_base(output, input, output_sizes, input_sizes, options);
}

WorkPtr ShmBackend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                             const c10d::AllToAllOptions& options) {
  return gloo_->alltoall(outputs, inputs, options);
}

WorkPtr ShmBackend::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return gloo_->send(tensors, destination, tag);
}

WorkPtr ShmBackend::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return gloo_->recv(tensors, source, tag);
}

WorkPtr ShmBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return gloo_->recvAnysource(tensors, tag);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  gloo_->monitoredBarrier(options, wait_all_ranks);
}

void ShmBackend::setSequenceNumberForGroup() { gloo_->setSequenceNumberForGroup(); }

std::uint64_t ShmBackend::getSequenceNumberForGroup() {
  return gloo_->getSequenceNumberForGroup() + calls_;
}

}  // namespace ddp::shm
