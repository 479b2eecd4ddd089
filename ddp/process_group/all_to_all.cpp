#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddp/process_group/all_to_all.h>
#include <ddp/process_group/collective_call.h>

namespace ddp {
namespace {

using Counts = std::vector<std::int64_t>;

void check_splits(const detail::CollectiveCall& call, const Counts& splits, const char* argument,
                  const at::Tensor& tensor, const char* tensor_argument) {
  if (splits.empty()) {
    if (tensor.size(0) % call.size() != 0) {
      call.refuse(fmt::format("{} has {} rows, which {} ranks do not share equally; give {}",
                              tensor_argument, tensor.size(0), call.size(), argument));
    }
    return;
  }
  const bool negative =
      std::any_of(splits.begin(), splits.end(), [](std::int64_t size) { return size < 0; });
  if (static_cast<int>(splits.size()) != call.size() || negative ||
      std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) != tensor.size(0)) {
    call.refuse(fmt::format(
        "{} is [{}]; expected {} numbers, none negative, that add up to {}'s {} rows", argument,
        fmt::join(splits, ", "), call.size(), tensor_argument, tensor.size(0)));
  }
}

/// Rows as elements of the flat tensor that is sent.
Counts in_elements(Counts splits, const at::Tensor& tensor, const at::Tensor& sent) {
  const auto row = tensor.size(0) > 0 ? sent.numel() / tensor.size(0) : 1;
  for (auto& size : splits) {
    size *= row;
  }
  return splits;
}

}  // namespace

Work all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_to_all_single");
  const auto to = call.to_move(output, "output").flatten();
  const auto from = call.to_move(input, "input").flatten();
  if (output.scalar_type() != input.scalar_type()) {
    call.refuse(fmt::format("output is of dtype {} and input of {}; they must be the same",
                            c10::toString(output.scalar_type()),
                            c10::toString(input.scalar_type())));
  }
  if (output.dim() == 0 || input.dim() == 0) {
    call.refuse("output and input need a dimension to be split");
  }
  if (output.sizes().slice(1) != input.sizes().slice(1)) {
    call.refuse(fmt::format(
        "output has rows of shape [{}] and input of [{}]; they must be the same",
        fmt::join(output.sizes().slice(1), ", "), fmt::join(input.sizes().slice(1), ", ")));
  }
  check_splits(call, options.output_split_sizes(), "output_split_sizes", output, "output");
  check_splits(call, options.input_split_sizes(), "input_split_sizes", input, "input");
  if (options.output_split_sizes().empty() && options.input_split_sizes().empty() &&
      output.size(0) != input.size(0)) {
    call.refuse(fmt::format("output has {} rows and input {}; equal parts need the same",
                            output.size(0), input.size(0)));
  }
  auto output_counts = in_elements(options.output_split_sizes(), output, to);
  auto input_counts = in_elements(options.input_split_sizes(), input, from);
  return call.run(options.async_op(), [&] {
    auto received = to;
    auto sent = from;
    return call.group().alltoall_base(received, sent, output_counts, input_counts);
  });
}

Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const AllToAllOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_to_all");
  call.check_count(outputs, "outputs");
  call.check_count(inputs, "inputs");
  auto to = call.to_move(outputs, "outputs");
  auto from = call.to_move(inputs, "inputs");
  Counts output_counts;
  Counts input_counts;
  for (int rank = 0; rank < call.size(); ++rank) {
    for (const auto& tensor : {outputs[rank], inputs[rank]}) {
      if (tensor.scalar_type() != inputs[0].scalar_type()) {
        call.refuse(fmt::format("the tensors are of the dtypes {} and {}; all must be the same",
                                c10::toString(inputs[0].scalar_type()),
                                c10::toString(tensor.scalar_type())));
      }
    }
    to[rank] = to[rank].flatten();
    from[rank] = from[rank].flatten();
    output_counts.push_back(to[rank].numel());
    input_counts.push_back(from[rank].numel());
  }
  auto sent = at::cat(from);
  auto received =
      at::empty({std::accumulate(output_counts.begin(), output_counts.end(), std::int64_t{0})},
                sent.options());
  const auto finish = [received, to, output_counts]() mutable {
    const auto parts = received.split_with_sizes(output_counts);
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      to[rank].detach().copy_(parts[rank]);
    }
  };
  return call.run(
      options.async_op(),
      [&] { return call.group().alltoall_base(received, sent, output_counts, input_counts); },
      finish);
}

}  // namespace ddp
