#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <ddp/comm_hooks/hook_collectives.h>
#include <ddp/comm_hooks/hook_worker.h>
#include <ddp/comm_hooks/quantization.h>
#include <ddp/error.h>

namespace ddp::comm_hooks {
namespace {

/// Scale and zero point of each row of `rows`, as 2 x rows. The rule of Python's MinMaxObserver for
/// unsigned bytes: the range includes 0, which is exact then.
at::Tensor scales_and_zeros(const at::Tensor& rows) {
  const auto [least, greatest] = at::aminmax(rows, /*dim=*/1);
  const auto low = least.clamp_max(0);
  const auto scale = ((greatest.clamp_min(0) - low) / 255.0)
                         .clamp_min(static_cast<double>(std::numeric_limits<float>::epsilon()));
  const auto zero = (0 - at::round(low / scale)).clamp(0, 255);
  return at::stack({scale, zero});
}

at::Tensor quantized(const at::Tensor& rows, const at::Tensor& parameters) {
  const auto values = at::round(rows / parameters[0].unsqueeze(1)) + parameters[1].unsqueeze(1);
  return values.clamp(0, 255).to(at::kByte);
}

at::Tensor dequantized(const at::Tensor& bytes, const at::Tensor& parameters) {
  return parameters[0].unsqueeze(1) * (bytes.to(at::kFloat) - parameters[1].unsqueeze(1));
}

std::vector<at::Tensor> gathered(const ProcessGroup& group, detail::HookWorker& worker,
                                 at::Tensor own) {
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs[0].push_back(at::empty_like(own));
  }
  std::vector<at::Tensor> inputs{std::move(own)};
  worker.wait(*group->allgather(outputs, inputs));
  return outputs[0];
}

at::Tensor mean_of_quantized(const ProcessGroup& group, detail::HookWorker& worker,
                             const at::Tensor& rows) {
  const auto parameters = gathered(group, worker, scales_and_zeros(rows));
  const auto all = gathered(
      group, worker, quantized(rows, parameters[static_cast<std::size_t>(group->getRank())]));
  auto sum = at::zeros_like(rows);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    sum.add_(dequantized(all[rank], parameters[rank]));
  }
  return sum.div_(group->getSize());
}

/// `channel_size` 0: the whole bucket is one channel.
CommHook quantization(const ProcessGroup& given_group, std::int64_t channel_size) {
  return [group = detail::hook_group(given_group), channel_size,
          worker = std::make_shared<detail::HookWorker>()](c10d::GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const auto buffer = bucket.getBuffer();
    if (buffer.numel() == 0) {
      return detail::completed(buffer);
    }
    // Without a hold on the worker, whose jobs would otherwise destroy it in its own thread.
    return worker->run(buffer, [group, channel_size, &worker = *worker, buffer] {
      const auto real = detail::as_real(buffer).reshape(-1);
      const auto size = real.numel();
      const auto width = channel_size > 0 ? channel_size : size;
      // Per channel as Python: a bucket that ends with a channel gets one of zeros behind it.
      const auto padding = channel_size > 0 ? width - size % width : 0;
      const auto rows = at::constant_pad_nd(real.to(at::kFloat), {0, padding}).view({-1, width});
      const auto mean = mean_of_quantized(group, worker, rows).view(-1).narrow(0, 0, size);
      detail::as_real(buffer).copy_(mean.view_as(detail::as_real(buffer)));
      return buffer;
    });
  };
}

}  // namespace

CommHook quantization_per_tensor(const ProcessGroup& group) { return quantization(group, 0); }

CommHook quantization_per_channel(const QuantizationPerChannelOptions& options,
                                  const ProcessGroup& group) {
  if (options.channel_size() < 1) {
    throw UsageError(
        fmt::format("quantization_per_channel: channel_size is {}; it must be positive",
                    options.channel_size()));
  }
  return quantization(group, options.channel_size());
}

}  // namespace ddp::comm_hooks
