#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/reduce.h>

namespace ddp {

Work all_reduce(const at::Tensor& tensor, const AllReduceOptions& options,
                const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "all_reduce");
  c10d::AllreduceOptions native;
  native.reduceOp = options.op();
  native.asyncOp = call.is_async(options.async_op(), tensor);
  std::vector<at::Tensor> tensors{call.to_reduce_dense(tensor, &native.reduceOp)};
  return call.run(options.async_op(), [&] { return call.group().allreduce(tensors, native); });
}

Work reduce(const at::Tensor& tensor, const ReduceOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "reduce");
  call.check_rank(options.dst(), "dst");
  c10d::ReduceOptions native;
  native.reduceOp = options.op();
  native.rootRank = options.dst();
  native.asyncOp = call.is_async(options.async_op(), tensor);
  std::vector<at::Tensor> tensors{call.to_reduce_dense(tensor, &native.reduceOp)};
  return call.run(options.async_op(), [&] { return call.group().reduce(tensors, native); });
}

Work reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                    const ReduceScatterOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "reduce_scatter");
  call.check_count(inputs, "inputs");
  c10d::ReduceScatterOptions native;
  native.asyncOp = call.is_async(options.async_op(), output);
  std::vector<std::vector<at::Tensor>> input_lists(1);
  for (const auto& input : inputs) {
    call.check_like(input, "an input", output, "output", output.defined() ? output.numel() : 0);
    native.reduceOp = options.op();
    input_lists[0].push_back(call.to_reduce(input, &native.reduceOp, "an input").flatten());
  }
  native.reduceOp = options.op();
  std::vector<at::Tensor> outputs{call.to_reduce(output, &native.reduceOp, "output").flatten()};
  return call.run(options.async_op(),
                  [&] { return call.group().reduce_scatter(outputs, input_lists, native); });
}

Work reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "reduce_scatter_tensor");
  call.check_like(input, "input", output, "output",
                  output.defined() ? output.numel() * call.size() : 0);
  c10d::ReduceScatterOptions native;
  native.asyncOp = call.is_async(options.async_op(), output);
  native.reduceOp = options.op();
  auto from = call.to_reduce(input, &native.reduceOp, "input").flatten();
  native.reduceOp = options.op();
  auto to = call.to_reduce(output, &native.reduceOp, "output").flatten();
  return call.run(options.async_op(),
                  [&] { return call.group()._reduce_scatter_base(to, from, native); });
}

}  // namespace ddp
