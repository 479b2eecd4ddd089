#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <ddp/reducer/device_backend.h>
#include <ddp/reducer/device_streams.h>
#include <ddp/reducer/message_memory.h>
#include <ddp/reducer/named_parameter.h>

namespace ddp {

/// Gradients of one dtype and device in one flat tensor, which is all-reduced as a whole. Complex
/// gradients are stored as pairs of reals. Or the one gradient of a parameter that expects a sparse
/// one.
///
/// See Note [Gradients as aliases]. Not thread-safe; the reducer serialises.
class Bucket {
 public:
  /// `indices` are positions in `parameters`; that and `allocator` outlive the bucket.
  Bucket(const std::vector<NamedParameter>& parameters, std::vector<std::size_t> indices,
         const detail::MessageAllocator& allocator);

  const std::vector<std::size_t>& indices() const { return indices_; }
  bool is_sparse() const { return is_sparse_; }
  /// The tensor that is communicated: one-dimensional, contiguous; or the sparse gradient, empty
  /// before `complete`.
  const at::Tensor& message() const { return message_; }
  /// The same values in the parameters' dtype, as a hook sees them: of complex ones half as many.
  at::Tensor typed_message() const;
  std::int64_t bytes() const;

  /// Begins a pass. `keep_gradients`: what the program still holds of earlier gradients is not
  /// overwritten.
  void begin(const std::vector<NamedParameter>& parameters, bool keep_gradients);

  /// The same for a pass to which this rank contributes zeros only: no gradient of its own is
  /// touched, by this or by what follows.
  void begin_with_zeros(const std::vector<NamedParameter>& parameters);

  /// Takes the gradient of the bucket's parameter number `position`, times `pass_factor`, into
  /// the bucket; several in one pass add up. The parameter has no gradient then until the launch
  /// (a sparse one: until `finish`). Off the CPU it is only kept here, and all are copied at the
  /// launch together. To be called with the stream as the current one that made the gradient.
  void collect(const std::vector<NamedParameter>& parameters, std::size_t position,
               double pass_factor);

  /// Before the launch, with the stream as the current one that it will follow: waits for the other
  /// streams' parts, collects what is missing and makes the slots the parameters' gradients. A
  /// parameter without a gradient contributes zeros. `used[i] == 0`: this pass gave parameter i no
  /// gradient, so that an older one only contributes and is left as it is.
  void complete(const std::vector<NamedParameter>& parameters, double pass_factor,
                const std::vector<std::int32_t>& used);

  /// After a failed pass: nobody takes its gradients for averages, since there are none.
  void drop_gradients(const std::vector<NamedParameter>& parameters);

  /// Takes `result` for the reduced values, where they came in another tensor: a hook's, or a
  /// sparse one. Throws std::runtime_error where that does not fit the bucket.
  void take_result(const at::Tensor& result);

  /// After the reduction: completes those gradients that `complete` could not. `used_anywhere`
  /// empty: every parameter counts as used on some rank.
  void finish(const std::vector<NamedParameter>& parameters,
              const std::vector<std::int32_t>& used_anywhere);

  /// The gradients' offsets, lengths and sizes in `typed_message()`, for communication hooks.
  std::vector<std::size_t> offsets() const;
  std::vector<std::size_t> lengths() const;
  std::vector<c10::IntArrayRef> sizes() const;

  /// Parameters still awaited in this pass; kept by the reducer.
  std::size_t pending = 0;
  /// How the backend treats the message; kept by the reducer.
  detail::WaitKind wait_kind = detail::WaitKind::kHost;
  bool averages_natively = false;

 private:
  enum class State : std::uint8_t {
    kWaiting,    // nothing came in this pass yet
    kCollected,  // the slot has this pass's gradient
    kCopyBack,   // the same, but the gradient has a graph of its own (create_graph): it stays, and
                 // the averaged values are copied into it
    kUnused,     // no gradient in this pass on this rank
    kZero,       // this rank stands aside in this pass
  };

  struct Slot {
    at::TensorOptions options;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    std::int64_t offset = 0;  // in elements of the parameter's dtype
    std::int64_t numel = 0;
    at::Tensor alias;
    at::Tensor gradient;  // collected, and not copied yet
    State state = State::kWaiting;
  };

  void allocate();
  at::Tensor empty_sparse() const;
  at::Tensor as_sparse(const at::Tensor& gradient) const;
  void take_sparse(Slot& slot, const at::Tensor& gradient, double factor);
  void take(Slot& slot, const at::Tensor& gradient, double factor) const;
  void collect_later(Slot& slot, at::Tensor& gradient);
  void take_first(Slot& slot) const;
  void copy_collected();
  bool is_kept_elsewhere(const std::vector<NamedParameter>& parameters) const;

  std::vector<std::size_t> indices_;
  const detail::MessageAllocator* allocator_;
  const bool is_sparse_;
  std::vector<Slot> slots_;
  at::TensorOptions message_options_;
  std::int64_t message_numel_ = 0;
  at::Tensor message_;
  detail::DeviceStreams streams_;
  const bool copies_at_launch_;
};

}  // namespace ddp
