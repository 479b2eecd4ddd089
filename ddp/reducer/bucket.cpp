#include <utility>

#include <ATen/ATen.h>

#include <ddp/reducer/bucket.h>

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
// The averaging factor is applied once, while copying in (or in place), when the bucket is launched
// and not in the hook: a parameter's hook may fire several times in a pass (a checkpoint runs parts
// of it again), and the last firing must find the plain sum.

namespace ddp {
namespace {

bool is_alias(const at::Tensor& gradient, const at::Tensor& alias) {
  return gradient.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl();
}

}  // namespace

Bucket::Bucket(const std::vector<NamedParameter>& parameters, std::vector<std::size_t> indices)
    : indices_(std::move(indices)) {
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
  flat_options_ = slots_.front().options.dtype(is_complex ? c10::toRealValueType(dtype) : dtype);
  flat_numel_ = is_complex ? 2 * numel : numel;
  allocate();
}

void Bucket::allocate() {
  const at::NoGradGuard no_grad;
  flat_ = at::empty({flat_numel_}, flat_options_);
  for (auto& slot : slots_) {
    slot.alias = at::empty({0}, slot.options);
    slot.alias.set_(flat_.storage(), slot.offset, slot.sizes, slot.strides);
  }
}

bool Bucket::is_kept_elsewhere(const std::vector<NamedParameter>& parameters) const {
  // The storage belongs to the flat tensor and the aliases; anything beyond is the program's, as is
  // a reference to an alias that is not a gradient any more.
  if (flat_.storage().use_count() > 1 + slots_.size()) {
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

void Bucket::fill(const std::vector<NamedParameter>& parameters, double factor, bool keep_gradients,
                  const std::vector<std::int32_t>& used) {
  const at::NoGradGuard no_grad;
  if (keep_gradients && is_kept_elsewhere(parameters)) {
    allocate();
  }
  const auto scale = at::scalar_tensor(factor, at::TensorOptions().dtype(at::kDouble));
  std::size_t in_place = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    const bool is_used = used[indices_[i]] != 0;
    auto& gradient = parameters[indices_[i]].tensor.mutable_grad();
    if (!gradient.defined()) {
      slot.alias.zero_();
      slot.state = is_used ? State::kInstalled : State::kUnused;
    } else if (is_used && is_alias(gradient, slot.alias)) {
      slot.state = State::kInPlace;
      ++in_place;
      continue;
    } else {
      if (!is_used && gradient.is_alias_of(flat_)) {
        // An older gradient, which stays as it is unless another rank has used the parameter.
        gradient = gradient.clone();
      }
      slot.state = !is_used                   ? State::kUnused
                   : gradient.requires_grad() ? State::kCopyBack
                                              : State::kInstalled;
      if (factor == 1.0) {
        slot.alias.copy_(gradient);
      } else {
        at::mul_out(slot.alias, gradient, scale);
      }
    }
    if (slot.state == State::kInstalled) {
      gradient = slot.alias;
    }
  }
  if (factor == 1.0 || in_place == 0) {
    return;
  }
  if (in_place == slots_.size()) {
    flat_.mul_(scale);
    return;
  }
  for (auto& slot : slots_) {
    if (slot.state == State::kInPlace) {
      slot.alias.mul_(scale);
    }
  }
}

void Bucket::take_result(const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  if (!result.is_alias_of(flat_)) {
    flat_.copy_(result.view_as(flat_));
  }
}

void Bucket::finish(const std::vector<NamedParameter>& parameters,
                    const std::vector<std::int32_t>& used_anywhere) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    auto& gradient = parameters[indices_[i]].tensor.mutable_grad();
    if (slot.state == State::kCopyBack) {
      gradient.detach().copy_(slot.alias);
    } else if (slot.state == State::kUnused &&
               (used_anywhere.empty() || used_anywhere[indices_[i]] != 0)) {
      gradient = slot.alias;
    }
  }
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
