#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ddp/error.h>
#include <ddp/nn/synchronized_normalization.h>
#include <ddp/process_group/collective_call.h>

namespace ddp::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// A value a channel, in the shape that is multiplied with `input`.
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return values.view(shape);
}

at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

/// A gradient that the graph of a second derivative reaches, and its backward refuses: what
/// once_differentiable is in Python. The other arguments are what the gradient depends on.
struct OnceDifferentiable : Function<OnceDifferentiable> {
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& gradient,
                            const at::Tensor& /*grad_output*/, const at::Tensor& /*input*/,
                            const std::optional<at::Tensor>& /*weight*/) {
    return gradient.clone();
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*gradients*/) {
    throw UsageError(
        "SyncBatchNorm: a gradient that went through it was differentiated a second time, which it "
        "does not support; use a torch::nn::BatchNorm where second derivatives are needed");
  }
};

/// This rank's sums over all but the channels: of `grad_output`, and of its product with the
/// normalised input.
std::tuple<at::Tensor, at::Tensor> own_sums(const at::Tensor& grad_output, const at::Tensor& input,
                                            const at::Tensor& mean, const at::Tensor& invstd) {
  if (input.numel() == 0) {
    return {at::zeros_like(mean), at::zeros_like(mean)};
  }
  // The gradients of a batch norm's bias and weight.
  const auto gradients = at::native_batch_norm_backward(
      grad_output.contiguous(input.suggest_memory_format()), input, at::ones_like(mean),
      /*running_mean=*/{}, /*running_var=*/{}, mean, invstd, /*train=*/true, /*eps=*/0,
      std::array<bool, 3>{false, true, true});
  return {std::get<2>(gradients), std::get<1>(gradients)};
}

/// Both sums over all ranks. In double: as exact as on one rank, and alike for any dtypes.
std::tuple<at::Tensor, at::Tensor> sums_of_all(const at::Tensor& first, const at::Tensor& second,
                                               const ProcessGroup& group) {
  const CollectiveCall call(group, "SyncBatchNorm's all-reduce in backward");
  ReduceOp sum(ReduceOp::SUM);
  std::vector<at::Tensor> tensors{call.to_reduce(at::cat({first, second}).to(at::kDouble), &sum)};
  call.run(/*async_op=*/false, [&] { return call.group().allreduce(tensors); });
  const auto halves = tensors[0].to(first.scalar_type()).chunk(2);
  return {halves[0], halves[1]};
}

struct SynchronizedNormalization : Function<SynchronizedNormalization> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias,
                            const BatchStatistics& statistics, double eps,
                            const ProcessGroup& group) {
    const auto dtype = at::toOpMathType(input.scalar_type());
    const auto mean = statistics.mean.to(dtype);
    const auto variance = statistics.variance.to(dtype);
    context->save_for_backward({input, *weight, mean, (variance + eps).rsqrt()});
    context->saved_data["count"] = statistics.count;
    context->saved_data["reduces"] = statistics.reduces_in_backward;
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    if (input.numel() == 0) {
      return at::empty_like(input);
    }
    // Given statistics: the evaluation of a batch norm.
    return std::get<0>(at::native_batch_norm(input, in_dtype(*weight, dtype),
                                             in_dtype(*bias, dtype), mean, variance,
                                             /*training=*/false, /*momentum=*/0, eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    const auto& grad_output = grad_outputs[0];
    variable_list gradients(6);
    {
      const at::NoGradGuard no_grad;
      const auto& mean = saved[2];
      const auto& invstd = saved[3];
      const auto [sum, sum_normalized] = own_sums(grad_output, input, mean, invstd);
      // Zeros for an empty batch: this rank used the parameters as the others did.
      if (weight.defined()) {
        gradients[1] = sum_normalized.to(weight.scalar_type());
        gradients[2] = sum.to(weight.scalar_type());
      }
      if (context->saved_data["reduces"].toBool()) {
        const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
            context->saved_data["group"].toCapsule());
        const auto [total, total_normalized] = sums_of_all(sum, sum_normalized, group);
        if (context->needs_input_grad(0)) {
          gradients[0] = grad_of_input(grad_output, input, weight, mean, invstd, total,
                                       total_normalized, context->saved_data["count"].toDouble());
        }
      }
    }
    if (at::GradMode::is_enabled()) {
      for (auto& gradient : gradients) {
        if (gradient.defined()) {
          gradient = OnceDifferentiable::apply(gradient, grad_output, input,
                                               std::optional<at::Tensor>(weight));
        }
      }
    }
    return gradients;
  }

 private:
  /// (dy - E[dy] - x^ E[dy x^]) / std * weight, where x^ is the normalised input and E the mean
  /// over all ranks. Ioffe, Szegedy: Batch normalization, 2015, section 3.
  static at::Tensor grad_of_input(const at::Tensor& grad_output, const at::Tensor& input,
                                  const at::Tensor& weight, const at::Tensor& mean,
                                  const at::Tensor& invstd, const at::Tensor& total,
                                  const at::Tensor& total_normalized, double count) {
    if (input.numel() == 0) {
      return at::zeros_like(input);
    }
    const auto scale = weight.defined() ? invstd * weight.to(invstd.scalar_type()) : invstd;
    return (input - along_channels(mean, input))
        .mul_(along_channels(invstd * total_normalized / -count, input))
        .add_(grad_output)
        .sub_(along_channels(total / count, input))
        .mul_(along_channels(scale, input))
        .to(input.scalar_type());
  }
};

}  // namespace

at::Tensor normalize_synchronized(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const BatchStatistics& statistics,
                                  double eps, const ProcessGroup& group) {
  // Undefined tensors are arguments of a graph's node only as optionals.
  return SynchronizedNormalization::apply(input, std::optional<at::Tensor>(weight),
                                          std::optional<at::Tensor>(bias), statistics, eps, group);
}

}  // namespace ddp::detail
