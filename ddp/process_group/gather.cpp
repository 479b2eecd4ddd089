#include <fmt/format.h>

#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/gather.h>

namespace ddp {
namespace {

/// That the root brings a list of tensors like `one`, and no other rank does.
void check_list(const detail::CollectiveCall& call, const std::vector<at::Tensor>& list,
                const char* argument, const at::Tensor& one, const char* one_argument, int root,
                const char* root_argument) {
  if (call.rank() != root) {
    if (!list.empty()) {
      call.refuse(fmt::format("{} has {} tensors; it must be empty on every rank but {} ({})",
                              argument, list.size(), root_argument, root));
    }
    return;
  }
  call.check_count(list, argument);
  for (const auto& tensor : list) {
    call.check_like(tensor, fmt::format("a tensor of {}", argument).c_str(), one, one_argument,
                    one.defined() ? one.numel() : 0);
  }
}

std::vector<at::Tensor> flattened(std::vector<at::Tensor> tensors) {
  for (auto& tensor : tensors) {
    tensor = tensor.flatten();
  }
  return tensors;
}

}  // namespace

Work broadcast(const at::Tensor& tensor, const BroadcastOptions& options,
               const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "broadcast");
  call.check_rank(options.src(), "src");
  c10d::BroadcastOptions native;
  native.rootRank = options.src();
  native.asyncOp = call.is_async(options.async_op(), tensor);
  std::vector<at::Tensor> tensors{call.to_move_dense(tensor)};
  return call.run(options.async_op(), [&] { return call.group().broadcast(tensors, native); });
}

Work all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                const AllGatherOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_gather");
  call.check_count(outputs, "outputs");
  for (const auto& output : outputs) {
    call.check_like(output, "an output", input, "input", input.defined() ? input.numel() : 0);
  }
  std::vector<std::vector<at::Tensor>> output_lists{flattened(call.to_move(outputs, "outputs"))};
  std::vector<at::Tensor> inputs{call.to_move(input, "input").flatten()};
  c10d::AllgatherOptions native;
  native.asyncOp = call.is_async(options.async_op(), input);
  return call.run(options.async_op(),
                  [&] { return call.group().allgather(output_lists, inputs, native); });
}

Work all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const AllGatherOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_gather_into_tensor");
  call.check_like(output, "output", input, "input",
                  input.defined() ? input.numel() * call.size() : 0);
  auto to = call.to_move(output, "output").flatten();
  auto from = call.to_move(input, "input").flatten();
  c10d::AllgatherOptions native;
  native.asyncOp = call.is_async(options.async_op(), input);
  return call.run(options.async_op(),
                  [&] { return call.group()._allgather_base(to, from, native); });
}

Work gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs,
            const GatherOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "gather");
  call.check_rank(options.dst(), "dst");
  check_list(call, outputs, "outputs", input, "input", options.dst(), "dst");
  c10d::GatherOptions native;
  native.rootRank = options.dst();
  std::vector<std::vector<at::Tensor>> output_lists;
  if (call.rank() == options.dst()) {
    output_lists.push_back(flattened(call.to_move(outputs, "outputs")));
  }
  std::vector<at::Tensor> inputs{call.to_move(input, "input").flatten()};
  return call.run(options.async_op(),
                  [&] { return call.group().gather(output_lists, inputs, native); });
}

Work scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
             const ScatterOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "scatter");
  call.check_rank(options.src(), "src");
  check_list(call, inputs, "inputs", output, "output", options.src(), "src");
  c10d::ScatterOptions native;
  native.rootRank = options.src();
  std::vector<std::vector<at::Tensor>> input_lists;
  if (call.rank() == options.src()) {
    input_lists.push_back(flattened(call.to_move(inputs, "inputs")));
  }
  std::vector<at::Tensor> outputs{call.to_move(output, "output").flatten()};
  return call.run(options.async_op(),
                  [&] { return call.group().scatter(outputs, input_lists, native); });
}

}  // namespace ddp
