#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

namespace ddp {

/// Dtypes in which a wrapped model computes and communicates, with Python's names; its parameters
/// and gradients stay as they are for the optimizer. What is not given stays in the module's own.
class MixedPrecision {
 public:
  /// Of parameters and floating inputs, from a forward to the end of its backward. Outputs have
  /// this dtype, too.
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype);
  /// Of gradients on the wire, float16 or bfloat16 (or the parameters' own); where it is not given,
  /// `param_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype);
  /// Of floating buffers, from construction on.
  TORCH_ARG(std::optional<at::ScalarType>, buffer_dtype);
};

namespace detail {

/// Parameters that take on a lower precision for forward and backward.
///
/// A parameter is the same tensor all the time, and its data are exchanged (`set_data`). A graph
/// refers to the tensor, so the data must not change back before its backward. Not thread-safe.
class LoweredParameters {
 public:
  /// Of `parameters` those that are floating and not of `dtype`.
  LoweredParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  at::ScalarType dtype() const { return dtype_; }
  /// Rounds the values to `dtype`; nothing where they are already. `until_backward`: a graph is
  /// going to refer to them.
  void lower(bool until_backward);
  bool awaits_backward() const { return awaits_backward_; }
  /// Gives the values back, and gradients the parameters' own dtype; nothing where they were not
  /// lowered.
  void restore();

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> values_;
  at::ScalarType dtype_;
  bool is_lowered_ = false;
  bool awaits_backward_ = false;
};

}  // namespace detail
}  // namespace ddp
