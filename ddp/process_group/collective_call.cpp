#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/collective_failure.h>
#include <ddp/process_group/group_registry.h>

namespace ddp::detail {
namespace {

/// The dtypes that Gloo takes.
bool is_native(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

const char* name_of(ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < std::size(kNames) ? kNames[op] : "UNUSED";
}

bool is_bitwise(ReduceOp::RedOpType op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

std::string shape(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

/// A dense tensor's elements in the order of its memory.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

CollectiveCall::CollectiveCall(const ProcessGroup& group_or_default, const char* name)
    : group_(resolve_group(group_or_default)), channel_(channel_of(group_)), name_(name) {
  if (const auto failure = channel_->failure(); !failure.empty()) {
    channel_->abort(failure);  // one that was found on the device: the other ranks hear of it
    throw CommunicationError(
        fmt::format("rank {}: {}: the process group failed earlier; destroy it with "
                    "ddp::destroy_process_group(). It failed with: {}",
                    group_->getRank(), name, failure));
  }
}

void CollectiveCall::refuse(const std::string& why) const {
  throw UsageError(fmt::format("rank {}: {}: {}", rank(), name_, why));
}

void CollectiveCall::check_rank(int rank, const char* argument) const {
  if (rank < 0 || rank >= size()) {
    refuse(fmt::format("{} is {}; the group has the ranks 0 to {}", argument, rank, size() - 1));
  }
}

void CollectiveCall::check_count(const std::vector<at::Tensor>& tensors,
                                 const char* argument) const {
  if (static_cast<int>(tensors.size()) != size()) {
    refuse(fmt::format("{} has {} tensors; expected one for each of the {} ranks", argument,
                       tensors.size(), size()));
  }
}

void CollectiveCall::check_like(const at::Tensor& tensor, const char* argument,
                                const at::Tensor& other, const char* other_argument,
                                std::int64_t numel) const {
  if (!tensor.defined() || !other.defined()) {
    refuse(fmt::format("{} is undefined", tensor.defined() ? other_argument : argument));
  }
  if (tensor.scalar_type() != other.scalar_type()) {
    refuse(fmt::format("{} is of dtype {} and {} of {}; they must be the same", argument,
                       c10::toString(tensor.scalar_type()), other_argument,
                       c10::toString(other.scalar_type())));
  }
  if (tensor.numel() != numel) {
    refuse(fmt::format(
        "{} has the shape {}, {} elements; expected {} ({} has the shape {}, and there are {} "
        "ranks)",
        argument, shape(tensor), tensor.numel(), numel, other_argument, shape(other), size()));
  }
}

bool CollectiveCall::is_async(bool async_op, const at::Tensor& tensor) const {
  return async_op || (tensor.defined() && wait_kind(*group_, tensor.device()) == WaitKind::kStream);
}

void CollectiveCall::check_tensor(const at::Tensor& tensor, const char* argument,
                                  bool contiguous) const {
  if (!tensor.defined()) {
    refuse(fmt::format("{} is undefined", argument));
  }
  wait_kind_ = wait_kind(*group_, tensor.device());
  if (tensor.layout() != c10::kStrided || tensor.is_quantized()) {
    refuse(fmt::format("{} is not dense ({})", argument, tensor.toString()));
  }
  if (!(contiguous ? tensor.is_contiguous() : tensor.is_non_overlapping_and_dense())) {
    refuse(fmt::format(
        "{} is not dense and contiguous (shape {}, strides [{}]); pass tensor.contiguous()",
        argument, shape(tensor), fmt::join(tensor.strides(), ", ")));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    refuse(fmt::format(
        "{} is a lazy conjugate or negative; pass tensor.resolve_conj().resolve_neg()", argument));
  }
}

at::Tensor CollectiveCall::movable(const at::Tensor& tensor) const {
  return is_native(tensor.scalar_type()) ? tensor : flat(tensor.detach()).view(at::kByte);
}

at::Tensor CollectiveCall::reducible(const at::Tensor& tensor, ReduceOp* op,
                                     const char* argument) const {
  const ReduceOp::RedOpType kind = *op;
  const auto dtype = tensor.scalar_type();
  const auto cannot = [&] {
    refuse(fmt::format("{} is of dtype {}, which {} cannot reduce with {}", argument,
                       c10::toString(dtype), group_->getBackendName(), name_of(kind)));
  };
  if (kind >= ReduceOp::PREMUL_SUM) {
    cannot();
  }
  if (tensor.is_complex()) {
    if (kind != ReduceOp::SUM && kind != ReduceOp::AVG) {
      cannot();
    }
    const auto real = at::view_as_real(flat(tensor.detach()));
    return is_native(real.scalar_type()) ? real : (cannot(), real);
  }
  if (!is_native(dtype) || (is_bitwise(kind) && tensor.is_floating_point()) ||
      (kind == ReduceOp::AVG && !tensor.is_floating_point())) {
    cannot();
  }
  if (dtype == at::kBool) {
    // Gloo adds bools as bytes, and a bool of value 2 is none.
    if (kind == ReduceOp::SUM) {
      *op = ReduceOp(ReduceOp::MAX);
    } else if (kind == ReduceOp::PRODUCT) {
      *op = ReduceOp(ReduceOp::MIN);
    }
  }
  return tensor;
}

at::Tensor CollectiveCall::to_move(const at::Tensor& tensor, const char* argument) const {
  check_tensor(tensor, argument, /*contiguous=*/true);
  return movable(tensor);
}

std::vector<at::Tensor> CollectiveCall::to_move(const std::vector<at::Tensor>& tensors,
                                                const char* argument) const {
  std::vector<at::Tensor> result;
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    result.push_back(to_move(tensors[index], fmt::format("{}[{}]", argument, index).c_str()));
  }
  return result;
}

at::Tensor CollectiveCall::to_move_dense(const at::Tensor& tensor) const {
  check_tensor(tensor, "the tensor", /*contiguous=*/false);
  return movable(tensor);
}

at::Tensor CollectiveCall::to_reduce(const at::Tensor& tensor, ReduceOp* op,
                                     const char* argument) const {
  check_tensor(tensor, argument, /*contiguous=*/true);
  return reducible(tensor, op, argument);
}

at::Tensor CollectiveCall::to_reduce_dense(const at::Tensor& tensor, ReduceOp* op) const {
  check_tensor(tensor, "the tensor", /*contiguous=*/false);
  return reducible(tensor, op, "the tensor");
}

Work CollectiveCall::run(bool async_op,
                         const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                         std::function<void()> finish) const {
  c10::intrusive_ptr<c10d::Work> started;
  try {
    started = start();
  } catch (const std::exception& error) {
    const auto why = concise(error);
    // c10d refuses with its own errors before it begins. Gloo's are of a connection that was lost;
    // and the debug wrapper talks to the other ranks first: of what it finds there, only a mismatch
    // leaves all ranks where they were.
    const bool refused = dynamic_cast<const c10::Error*>(&error) != nullptr &&
                         dynamic_cast<const c10::DistError*>(&error) == nullptr;
    const bool detail = c10d::debug_level() == c10d::DebugLevel::Detail;
    if (!refused || (detail && why.find("Detected mismatch") == std::string::npos)) {
      fail_collective(*channel_, name_, why);
    }
    refuse(why);
  }
  Work work(std::move(started), channel_, name_, std::move(finish), wait_kind_);
  if (!async_op) {
    work.wait();
  }
  return work;
}

}  // namespace ddp::detail
