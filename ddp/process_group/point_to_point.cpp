#include <fmt/format.h>

#include <ddp/process_group/collective_call.h>
#include <ddp/process_group/point_to_point.h>

namespace ddp {
namespace {

void check_other(const detail::CollectiveCall& call, int rank, const char* argument, int tag) {
  call.check_rank(rank, argument);
  if (rank == call.rank()) {
    call.refuse(fmt::format("{} is this rank itself", argument));
  }
  if (tag < 0) {
    call.refuse(fmt::format("tag is {}; it must not be negative", tag));
  }
}

}  // namespace

Work send(const at::Tensor& tensor, const SendOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "send");
  check_other(call, options.dst(), "dst", options.tag());
  std::vector<at::Tensor> tensors{call.to_move(tensor)};
  return call.run(options.async_op(),
                  [&] { return call.group().send(tensors, options.dst(), options.tag()); });
}

Work recv(const at::Tensor& tensor, const RecvOptions& options, const ProcessGroup& group) {
  const detail::CollectiveCall call(group, "recv");
  const bool any = options.src() == -1;
  if (any && call.size() < 2) {
    call.refuse("there is no other rank to receive from");
  }
  check_other(call, any ? (call.rank() + 1) % call.size() : options.src(), "src", options.tag());
  std::vector<at::Tensor> tensors{call.to_move(tensor)};
  return call.run(options.async_op(), [&] {
    return any ? call.group().recvAnysource(tensors, options.tag())
               : call.group().recv(tensors, options.src(), options.tag());
  });
}

}  // namespace ddp
