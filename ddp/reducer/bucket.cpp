#include <cmath>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/reducer/bucket.h>
#include <ddp/reducer/scaled_copy.h>

// Note [Gradients as aliases]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After a pass a parameter's gradient *is* its slot in the bucket: a tensor over the bucket's
// storage, made with set_() and not with narrow(), since a view cannot be detached in place and
// zero_grad() does that. So a gradient is copied once, into the bucket, and never back; and where
// the program keeps its gradients (zero_grad(set_to_none=false), accumulation), autograd adds into
// the bucket and there is no copy at all.
//
// gradient_as_bucket_view(false) promises that a gradient which the program still holds is not
// overwritten by a later pass. The storage is then handed over: when a pass finds that somebody
// else still refers to it, the bucket takes a new one. In the usual loop nobody does, and nothing
// is allocated from step to step.
//
// A gradient goes into its slot in the hook, while it is still in the cache, and its own memory is
// free at once for the next layer's. It is multiplied by the averaging factor on the way. A
// parameter's hook may fire several times in a pass (a checkpoint runs parts of it again), and what
// comes then must not be added to values that are scaled already: so the parameter has no gradient
// between its hook and its bucket's launch, autograd makes a new one, and the slot adds that one
// up.
//
// On a GPU it is the number of kernels that counts, not the cache: the slots hold the gradients
// themselves until the launch, which copies them in one go and multiplies the whole message once.

// Note [Streams]
// ~~~~~~~~~~~~~~
// A bucket is filled by hooks that run with their parameters' streams, launched by one of them (of
// this bucket, or of one before it), reduced on the backend's own stream, and read on the stream
// that called backward(). The order among them:
// - the launching stream waits for those that filled the bucket, or made the gradients in it;
// - the backend's stream waits for the one that is current at the launch, as NCCL's does;
// - at the end of backward the caller's streams, which autograd has made current, wait for the
//   backend's (c10d::Work::wait), and the thread goes on.
// A hook writes into memory that the optimizer has read on the caller's stream: its gradient came
// out of a forward that followed there, and autograd orders the streams along the graph.
// Memory is told to the allocator for every stream that works on it (DeviceStreams).

namespace ddp {
namespace {

bool is_alias(const at::Tensor& gradient, const at::Tensor& alias) {
  return gradient.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl();
}

}  // namespace

Bucket::Bucket(const std::vector<NamedParameter>& parameters, std::vector<std::size_t> indices,
               const detail::MessageAllocator& allocator)
    : indices_(std::move(indices)),
      allocator_(&allocator),
      is_sparse_(parameters[indices_.front()].expects_sparse),
      streams_(parameters[indices_.front()].tensor.device()),
      copies_at_launch_(!is_sparse_ && !parameters[indices_.front()].tensor.is_cpu()) {
  std::int64_t numel = 0;
  for (const auto index : indices_) {
    const auto& parameter = parameters[index].tensor;
    Slot slot;
    slot.options = at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
    slot.sizes = parameter.sizes().vec();
    if (parameter.is_non_overlapping_and_dense()) {
      slot.strides = parameter.strides().vec();
    } else {
      slot.strides.resize(slot.sizes.size());
      std::int64_t stride = 1;
      for (std::size_t i = slot.sizes.size(); i-- > 0;) {
        slot.strides[i] = stride;
        stride *= std::max<std::int64_t>(slot.sizes[i], 1);
      }
    }
    slot.offset = numel;
    slot.numel = parameter.numel();
    numel += slot.numel;
    slots_.push_back(std::move(slot));
  }
  const auto dtype = parameters[indices_.front()].tensor.scalar_type();
  const bool is_complex = c10::isComplexType(dtype);
  message_options_ = slots_.front().options.dtype(is_complex ? c10::toRealValueType(dtype) : dtype);
  message_numel_ = is_complex ? 2 * numel : numel;
  allocate();
}

void Bucket::allocate() {
  const at::NoGradGuard no_grad;
  streams_.forget();
  if (is_sparse_) {
    message_ = empty_sparse();
    return;
  }
  message_ = (*allocator_)(message_numel_, message_options_);
  for (auto& slot : slots_) {
    slot.alias = at::empty({0}, slot.options);
    slot.alias.set_(message_.storage(), slot.offset, slot.sizes, slot.strides);
  }
}

at::Tensor Bucket::empty_sparse() const {
  const auto& sizes = slots_.front().sizes;
  std::vector<std::int64_t> values{0};
  values.insert(values.end(), sizes.begin() + 1, sizes.end());
  const auto& options = slots_.front().options;
  return at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)),
                               at::empty(values, options), sizes, options.layout(at::kSparse),
                               /*is_coalesced=*/true);
}

at::Tensor Bucket::as_sparse(const at::Tensor& gradient) const {
  // A tied weight's gradient is dense where its other use gives a dense one.
  return gradient.is_sparse() ? gradient : gradient.detach().to_sparse(/*sparse_dim=*/1);
}

void Bucket::take_sparse(Slot& slot, const at::Tensor& gradient, double factor) {
  auto values = as_sparse(gradient);
  if (factor != 1.0) {
    values = values.div(std::round(1.0 / factor));  // as c10d does for sparse ones
  }
  message_ = slot.state == State::kCollected ? message_.add(values) : values;
}

bool Bucket::is_kept_elsewhere(const std::vector<NamedParameter>& parameters) const {
  if (is_sparse_) {
    return false;
  }
  // The storage belongs to the message and the aliases; anything beyond is the program's, as is a
  // reference to an alias that is not a gradient any more.
  if (message_.storage().use_count() > 1 + slots_.size()) {
    return true;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& alias = slots_[i].alias;
    if (alias.use_count() > 1 && !is_alias(parameters[indices_[i]].tensor.grad(), alias)) {
      return true;
    }
  }
  return false;
}

void Bucket::begin(const std::vector<NamedParameter>& parameters, bool keep_gradients) {
  streams_.begin_pass();
  if (keep_gradients && is_kept_elsewhere(parameters)) {
    allocate();
  }
  if (is_sparse_) {
    message_ = empty_sparse();
  }
  for (auto& slot : slots_) {
    slot.state = State::kWaiting;
    slot.gradient.reset();
  }
}

void Bucket::begin_with_zeros(const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  streams_.begin_pass();
  bool is_in_use = is_kept_elsewhere(parameters);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].state = State::kZero;
    slots_[i].gradient.reset();
    is_in_use = is_in_use || is_alias(parameters[indices_[i]].tensor.grad(), slots_[i].alias);
  }
  if (is_in_use || is_sparse_) {
    allocate();
  }
  if (!is_sparse_) {
    streams_.use(message_);
    message_.zero_();
  }
}

void Bucket::take(Slot& slot, const at::Tensor& gradient, double factor) const {
  if (gradient.is_sparse()) {  // no layer said that it would be
    take(slot, gradient.to_dense(), factor);
    return;
  }
  const bool is_in_place = is_alias(gradient, slot.alias);
  if (slot.state == State::kCollected) {
    slot.alias.add_(gradient, factor);
  } else if (factor != 1.0 && detail::scaled_copy(slot.alias, gradient, factor)) {
    return;
  } else if (factor == 1.0 || gradient.scalar_type() != slot.alias.scalar_type()) {
    if (!is_in_place) {
      slot.alias.copy_(gradient);
    }
    if (factor != 1.0) {
      slot.alias.mul_(factor);
    }
  } else {
    at::mul_out(slot.alias, gradient,
                at::scalar_tensor(factor, at::TensorOptions().dtype(at::kDouble)));
  }
}

void Bucket::collect(const std::vector<NamedParameter>& parameters, std::size_t position,
                     double pass_factor) {
  const at::NoGradGuard no_grad;
  const double factor = copies_at_launch_ ? 1.0 : pass_factor;
  auto& slot = slots_[position];
  auto& gradient = parameters[indices_[position]].tensor.mutable_grad();
  if (copies_at_launch_ && slot.state != State::kCollected && !gradient.requires_grad() &&
      gradient.layout() == at::kStrided) {
    collect_later(slot, gradient);
    return;
  }
  streams_.use_after_others(message_);
  if (slot.gradient.defined()) {
    take_first(slot);
  }
  if (is_sparse_) {
    take_sparse(slot, gradient, factor);
    slot.state = State::kCollected;
    gradient.reset();
    return;
  }
  if (gradient.requires_grad()) {
    slot.state = State::kWaiting;  // autograd added up in the gradient itself
    take(slot, gradient, factor);
    slot.state = State::kCopyBack;
    return;
  }
  take(slot, gradient, factor);
  slot.state = State::kCollected;
  gradient.reset();
}

void Bucket::collect_later(Slot& slot, at::Tensor& gradient) {
  streams_.use(message_);
  slot.gradient = std::exchange(gradient, at::Tensor());
  slot.state = State::kCollected;
}

void Bucket::take_first(Slot& slot) const {
  const auto gradient = std::exchange(slot.gradient, at::Tensor());
  detail::record_on_current_stream(gradient);
  slot.state = State::kWaiting;
  take(slot, gradient, 1.0);
  slot.state = State::kCollected;
}

void Bucket::copy_collected() {
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (auto& slot : slots_) {
    if (auto gradient = std::exchange(slot.gradient, at::Tensor());
        gradient.defined() && !is_alias(gradient, slot.alias)) {
      detail::record_on_current_stream(gradient);
      from.push_back(std::move(gradient));
      to.push_back(slot.alias);
    }
  }
  if (!from.empty()) {
    at::_foreach_copy_(to, from);
  }
}

void Bucket::complete(const std::vector<NamedParameter>& parameters, double pass_factor,
                      const std::vector<std::int32_t>& used) {
  const at::NoGradGuard no_grad;
  streams_.use_after_others(message_);
  copy_collected();
  const double factor = copies_at_launch_ ? 1.0 : pass_factor;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    auto& gradient = parameters[indices_[i]].tensor.mutable_grad();
    if (slot.state == State::kWaiting) {
      const bool is_used = used[indices_[i]] != 0;
      if (is_sparse_) {
        if (gradient.defined()) {
          take_sparse(slot, gradient, factor);
        }
      } else if (!gradient.defined()) {
        slot.alias.zero_();
      } else {
        if (!is_used && gradient.is_alias_of(message_)) {
          // An older gradient, which stays as it is unless another rank has used the parameter.
          gradient = gradient.clone();
        }
        take(slot, gradient, factor);
      }
      slot.state = is_used ? State::kCollected : State::kUnused;
    }
    if (slot.state == State::kCollected && !is_sparse_) {
      gradient = slot.alias;
    }
  }
  if (copies_at_launch_ && pass_factor != 1.0) {
    message_.mul_(pass_factor);
  }
}

void Bucket::drop_gradients(const std::vector<NamedParameter>& parameters) {
  for (const auto index : indices_) {
    parameters[index].tensor.mutable_grad().reset();
  }
  for (auto& slot : slots_) {
    slot.gradient.reset();
  }
}

at::Tensor Bucket::typed_message() const {
  const bool is_complex =
      !is_sparse_ && c10::isComplexType(slots_.front().options.dtype().toScalarType());
  return is_complex ? at::view_as_complex(message_.view({-1, 2})) : message_;
}

void Bucket::take_result(const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  if (is_sparse_) {
    const auto& slot = slots_.front();
    if (result.sizes() != slot.sizes) {
      throw std::runtime_error(
          fmt::format("its result has the shape [{}]; the sparse gradient has [{}]",
                      fmt::join(result.sizes(), ", "), fmt::join(slot.sizes, ", ")));
    }
    message_ = as_sparse(result).to(slot.options.dtype());
    return;
  }
  const auto expected = typed_message();
  if (result.layout() != at::kStrided || result.numel() != expected.numel() ||
      result.is_complex() != expected.is_complex()) {
    throw std::runtime_error(
        fmt::format("its result has {} elements of dtype {} ({}); the bucket has {} of dtype {}",
                    result.numel(), c10::toString(result.scalar_type()),
                    result.layout() == at::kStrided ? "dense" : "sparse", expected.numel(),
                    c10::toString(expected.scalar_type())));
  }
  if (!result.is_alias_of(message_)) {
    expected.copy_(result.reshape_as(expected));
  }
}

void Bucket::finish(const std::vector<NamedParameter>& parameters,
                    const std::vector<std::int32_t>& used_anywhere) {
  const at::NoGradGuard no_grad;
  streams_.use(message_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    const bool is_set_elsewhere =
        slot.state == State::kUnused && (used_anywhere.empty() || used_anywhere[indices_[i]] != 0);
    const bool is_result_elsewhere = is_sparse_ && slot.state == State::kCollected;
    if (!is_set_elsewhere && !is_result_elsewhere && slot.state != State::kCopyBack) {
      continue;  // most gradients are the slots already; nothing of theirs is touched again
    }
    auto& gradient = parameters[indices_[i]].tensor.mutable_grad();
    if (slot.state == State::kCopyBack) {
      gradient.detach().copy_(slot.alias);
    } else {
      gradient = is_sparse_ ? message_ : slot.alias;
    }
  }
}

std::int64_t Bucket::bytes() const {
  return is_sparse_ ? slots_.front().numel *
                          static_cast<std::int64_t>(slots_.front().options.dtype().itemsize())
                    : message_.numel() * message_.element_size();
}

std::vector<std::size_t> Bucket::offsets() const {
  std::vector<std::size_t> result;
  for (const auto& slot : slots_) {
    result.push_back(static_cast<std::size_t>(slot.offset));
  }
  return result;
}

std::vector<std::size_t> Bucket::lengths() const {
  std::vector<std::size_t> result;
  for (const auto& slot : slots_) {
    result.push_back(static_cast<std::size_t>(slot.numel));
  }
  return result;
}

std::vector<c10::IntArrayRef> Bucket::sizes() const {
  std::vector<c10::IntArrayRef> result;
  for (const auto& slot : slots_) {
    result.emplace_back(slot.sizes);
  }
  return result;
}

}  // namespace ddp
