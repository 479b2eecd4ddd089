#include <limits>
#include <test/support/catch2.h>
#include <test/support/fake_device.h>
#include <test/support/fake_process_group.h>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/comm_hooks/default_hooks.h>
#include <ddp/error.h>
#include <ddp/module_broadcast.h>
#include <ddp/process_group/reduce.h>
#include <ddp/reducer/reducer.h>

// The reducer on a device whose kernels are late and out of order: with a wait or a word to the
// allocator too few, a gradient is not what it must be.

using namespace ddp::test;
using Values = std::vector<float>;

namespace {

c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(fake_device().type()).getStream(fake_device());
}

/// As NCCL's: the stream that is current in `wait` waits, the thread does not.
class StreamWork : public c10d::Work {
 public:
  StreamWork(at::Tensor tensor, c10::Event end, std::uint64_t number)
      : c10d::Work(0, c10d::OpType::ALLREDUCE),
        tensor_(std::move(tensor)),
        end_(std::move(end)),
        number_(number) {}

  bool wait(std::chrono::milliseconds timeout) override {
    // With a limit NCCL blocks the thread.
    limited = limited || timeout != kNoTimeout;
    end_.block(current_stream());
    tensor_.reset();
    return true;
  }
  bool isCompleted() override { return false; }
  std::uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return result; }

  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<c10::ivalue::Future> result =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  static inline bool limited = false;

 private:
  at::Tensor tensor_;
  c10::Event end_;
  std::uint64_t number_;
};

/// A group whose collectives run on a stream of its own, behind what is current when they are
/// started. All ranks have the same values.
class StreamGroup : public c10d::ProcessGroup {
 public:
  explicit StreamGroup(int size)
      : ProcessGroup(c10::make_intrusive<c10d::HashStore>(), 0, size), stream(new_fake_stream()) {}
  const std::string getBackendName() const override { return "fake"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ops.push_back(options.reduceOp);
    const int factor = options.reduceOp == c10d::ReduceOp::SUM ? getSize() : 1;
    return start(tensors.front(), [this, factor, memory = memory_of(tensors.front())] {
      sent.push_back(memory.clone());
      memory.mul_(factor);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& /*options*/) override {
    return start(tensors.front(), [this, memory = memory_of(tensors.front())] {
      if (on_broadcast) {
        on_broadcast(memory);
      }
    });
  }
  void abort() override { aborted = true; }

  const c10::Stream stream;
  std::vector<c10d::ReduceOp> ops;
  std::vector<at::Tensor> sent;
  std::vector<c10::intrusive_ptr<StreamWork>> works;
  bool aborted = false;
  std::function<void(const at::Tensor& memory)> on_broadcast;

 private:
  c10::intrusive_ptr<c10d::Work> start(const at::Tensor& tensor, std::function<void()> kernel) {
    order_streams(current_stream(), stream);
    launch_fake_kernel(stream, {tensor}, std::move(kernel));
    c10::Event end(fake_device().type());
    end.record(stream);
    auto work = c10::make_intrusive<StreamWork>(tensor, std::move(end), works.size());
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{fake_device()});
    const c10::StreamGuard guard(stream);
    work->future->markCompleted(std::vector<at::Tensor>{tensor});
    works.push_back(work);
    return work;
  }
};

struct NamedBackend : c10d::Backend {
  NamedBackend() : Backend(0, 1) {}
  const std::string getBackendName() const override { return "nccl"; }
};

/// Two parameters that autograd looks after on streams of their own, and a caller on a third.
struct Model {
  explicit Model(int size = 3)
      : group((enable_fake_device(), c10::make_intrusive<StreamGroup>(size))) {
    for (const auto& stream : streams) {
      const c10::StreamGuard on_stream(stream);
      parameters.push_back({"p" + std::to_string(parameters.size()),
                            at::full({2}, 1.0F, fake_device()).set_requires_grad(true)});
      accumulators.push_back(torch::autograd::impl::grad_accumulator(parameters.back().tensor));
    }
    order_streams(streams[0], caller);
    order_streams(streams[1], caller);
  }

  void make() { reducer = ddp::Reducer::create(parameters, group, channel, "model", options); }

  /// Gradients `first` of the first parameter and `second` of the other one.
  void step(float first, float second) {
    reducer->prepare_for_forward();
    reducer->set_synchronize(true);
    ((weight(0) * first).sum() + (weight(1) * second).sum()).backward();
  }
  void forget_gradients() {
    for (auto& parameter : parameters) {
      parameter.tensor.mutable_grad().reset();
    }
  }
  const at::Tensor& weight(std::size_t index) const { return parameters[index].tensor; }
  at::Tensor gradient(std::size_t index) const { return parameters[index].tensor.grad(); }

  std::vector<c10::Stream> streams =
      (enable_fake_device(), std::vector{new_fake_stream(), new_fake_stream()});
  c10::Stream caller = new_fake_stream();
  c10::StreamGuard guard{caller};
  c10::intrusive_ptr<StreamGroup> group;
  std::shared_ptr<FakeChannel> channel = std::make_shared<FakeChannel>();
  std::vector<ddp::NamedParameter> parameters;
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> accumulators;
  ddp::ReducerOptions options;
  std::shared_ptr<ddp::Reducer> reducer;
};

}  // namespace

TEST_CASE("the fake device is late: what nobody has waited for is not there") {
  enable_fake_device();
  const auto first = new_fake_stream();
  const auto second = new_fake_stream();
  at::Tensor values;
  {
    const c10::StreamGuard guard(first);
    values = at::full({1}, 5.0F, fake_device());
  }
  const c10::StreamGuard guard(second);
  CHECK(std::isnan(read_fake(values)[0]));
  order_streams(first, second);
  CHECK(read_fake(values) == Values{5});
  // Freed while this stream has work on it, and the allocator knows of the first one only.
  auto sum = values + 1;
  values.reset();
  CHECK(std::isnan(read_fake(sum)[0]));
}

TEST_CASE("gradients from several streams are averages where backward was called") {
  Model model;
  model.make();
  const int before = host_waits();
  for (const float scale : {1.0F, 2.0F, 3.0F}) {
    model.forget_gradients();
    model.step(6 * scale, 9 * scale);
    if (scale == 1) {
      CHECK(host_waits() == before);  // laying the buckets out anew asks the device once
    }
    CHECK(read_fake(model.gradient(0)) == Values{6 * scale, 6 * scale});
    CHECK(read_fake(model.gradient(1)) == Values{9 * scale, 9 * scale});
  }
  CHECK(model.group->sent.front()[0].item<float>() == Approx(2));  // 6 / 3, and the sum is 6
  CHECK(model.group->ops.front() == c10d::ReduceOp::SUM);
  CHECK_FALSE(StreamWork::limited);
}

TEST_CASE("gradients that the program keeps and adds to on the device") {
  Model model(2);
  model.make();
  model.step(6, 9);
  model.step(1, 1);  // onto what is there
  CHECK(read_fake(model.gradient(0)) == Values{7, 7});
  CHECK(read_fake(model.gradient(1)) == Values{10, 10});
}

TEST_CASE("a gradient's memory stays its reader's, also when the program has let go of it") {
  Model model;
  {
    const c10::StreamGuard elsewhere(new_fake_stream());
    model.make();
  }
  model.step(6, 9);
  auto kept = model.gradient(0);
  const auto doubled = kept * 2;  // the caller's stream has not come to it yet
  model.forget_gradients();
  model.step(1, 2);  // a bucket of its own, as the first one is kept
  kept.reset();
  CHECK(read_fake(model.gradient(0)) == Values{1, 1});
  CHECK(read_fake(doubled) == Values{12, 12});
}

TEST_CASE("a bucket waits for all streams that have something in it") {
  enable_fake_device();
  const std::vector<ddp::NamedParameter> parameters{
      {"p", at::zeros({2}, fake_device()).set_requires_grad(true)}};
  const ddp::detail::MessageAllocator allocator = [](std::int64_t numel,
                                                     const at::TensorOptions& options) {
    return at::empty({numel}, options);
  };
  ddp::Bucket bucket(parameters, {0}, allocator);
  bucket.begin(parameters, /*keep_gradients=*/true);
  // Twice, as under a checkpoint.
  for (const float value : {3.0F, 5.0F}) {
    const c10::StreamGuard guard(new_fake_stream());
    parameters[0].tensor.mutable_grad() = at::full({2}, value, fake_device());
    bucket.collect(parameters, 0, 0.5);
  }
  const c10::StreamGuard guard(new_fake_stream());
  bucket.complete(parameters, 0.5, {1});
  CHECK(read_fake(bucket.message()) == Values{4, 4});
}

TEST_CASE("what averages by itself is given the gradients as they are") {
  for (const bool is_python_compatible : {false, true}) {
    Model model;
    model.group->setBackend(fake_device().type(), c10d::ProcessGroup::BackendType::CUSTOM,
                            c10::make_intrusive<NamedBackend>());
    model.options.python_compatible = is_python_compatible;
    model.make();
    model.step(6, 9);
    CHECK(read_fake(model.gradient(1)) == Values{9, 9});
    CHECK(model.group->ops.front() ==
          (is_python_compatible ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG));
    CHECK(model.group->sent.front().max().item<float>() == Approx(is_python_compatible ? 3 : 9));
  }
}

TEST_CASE("the hooks that compress stay on the device, and in stream order") {
  for (const bool in_bfloat16 : {false, true}) {
    Model model;
    model.make();
    model.reducer->register_comm_hook(in_bfloat16 ? ddp::comm_hooks::bf16_compress(model.group)
                                                  : ddp::comm_hooks::fp16_compress(model.group));
    const int before = host_waits();
    model.step(6, 12);
    CHECK(host_waits() == before);
    CHECK(read_fake(model.gradient(0)) == Values{6, 6});
    CHECK(read_fake(model.gradient(1)) == Values{12, 12});
    CHECK(model.group->sent.front().scalar_type() == (in_bfloat16 ? at::kBFloat16 : at::kHalf));
  }
}

TEST_CASE("the map of used parameters is read only where this rank has left one out") {
  Model model(2);
  model.options.find_unused_parameters = true;
  model.make();
  const int before = host_waits();
  model.step(2, 4);
  CHECK(host_waits() == before);
  model.forget_gradients();
  model.reducer->prepare_for_forward();
  (model.weight(0) * 3).sum().backward();
  CHECK(host_waits() > before);
  CHECK(read_fake(model.gradient(0)) == Values{3, 3});
  CHECK_FALSE(model.gradient(1).defined());
}

TEST_CASE("a broadcast of the module's tensors is in stream order") {
  Model model;
  std::vector<at::Tensor> tensors{model.weight(0).detach(), model.weight(1).detach()};
  const int before = host_waits();
  ddp::detail::broadcast_tensors(*model.group, model.channel.get(), tensors, 0);
  CHECK(host_waits() == before);
  CHECK(read_fake(tensors[1]) == Values{1, 1});
}

TEST_CASE("an all-reduce that failed on the device ends the next step, by name and number") {
  for (const bool timed_out : {true, false}) {
    Model model;
    model.make();
    model.step(1, 1);
    model.group->works.front()->result->markCompleted(static_cast<std::int64_t>(
        timed_out ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR));
    REQUIRE_THROWS_WITH(
        model.step(1, 1),
        contains(
            "rank 0 of 3: the all-reduce of bucket 0 of 1 (p0 ... p1, 2 parameters) (number 0 of "
            "the group) failed: ") &&
            contains(timed_out
                         ? "it timed out: a rank did not come to it"
                         : "the backend reported an error: a rank or a connection was lost") &&
            contains("rank 1 left: bored"));
    CHECK(model.channel->aborted);
    REQUIRE_THROWS_AS(model.step(1, 1), ddp::CommunicationError);
  }
  Model model;
  model.make();
  model.step(1, 1);
  model.group->works.front()->result->setError(
      std::make_exception_ptr(std::runtime_error("no reason")));
  REQUIRE_THROWS_WITH(model.step(1, 1), contains("the backend ended it for a reason of its own"));
}

TEST_CASE("an all-reduce that went well on the device is not spoken of") {
  Model model;
  model.make();
  model.step(1, 1);
  model.group->works.front()->result->markCompleted(static_cast<std::int64_t>(0));
  model.step(1, 1);
  CHECK(read_fake(model.gradient(0)) == Values{2, 2});
}

TEST_CASE("after a collective of the program's own the stream waits, and a failure is told later") {
  Model model(2);
  const ddp::ProcessGroup group = model.group;
  const auto values = model.weight(0).detach().clone();
  const int before = host_waits();
  ddp::all_reduce(values, {}, group);
  auto work = ddp::all_reduce(values, ddp::AllReduceOptions().async_op(true), group);
  work.wait();
  CHECK(host_waits() == before);
  CHECK_FALSE(StreamWork::limited);
  CHECK(read_fake(values) == Values{4, 4});
  model.group->works.front()->result->markCompleted(
      static_cast<std::int64_t>(c10d::WorkResult::TIMEOUT));
  REQUIRE_THROWS_WITH(
      ddp::all_reduce(values, {}, group),
      contains("rank 0: all_reduce: the process group failed earlier") &&
          contains("rank 0 of 2: all_reduce (number 0 of the group) failed: it timed out"));
  CHECK(model.group->aborted);
  ddp::destroy_process_group(group);
}

TEST_CASE("a layout whose broadcast failed on the device is not taken") {
  for (const int left_there : {-7, 0, 1, 1000000}) {
    Model model(2);
    model.make();
    model.step(1, 1);
    model.group->on_broadcast = [&](const at::Tensor& memory) { memory.fill_(left_there); };
    REQUIRE_THROWS_WITH(model.step(1, 1),
                        contains("rank 0 of 2: the broadcast of rank 0's layout of the buckets "
                                 "failed: what came is not a layout"));
    CHECK(model.channel->aborted);
  }
}

TEST_CASE("a graph's capture must not ask the device") {
  bool is_capturing = true;
  Model model(2);
  model.options.is_capturing = [&] { return is_capturing; };
  model.make();
  REQUIRE_THROWS_WITH(model.step(1, 1),  // its buckets would go with the next layout
                      contains("and must learn rank 0's order of the gradients"));
  is_capturing = false;
  model.step(1, 1);
  is_capturing = true;
  REQUIRE_THROWS_WITH(
      model.step(1, 1),
      contains("this step is being captured into a CUDA graph, and must learn rank "
               "0's order of the gradients, which a graph cannot do. Run at least"));
  is_capturing = false;
  model.step(1, 1);
  is_capturing = true;
  const int before = host_waits();
  model.step(1, 1);
  CHECK(host_waits() == before);
}

TEST_CASE("a captured step in which a parameter is unused is refused, and leaves no pass open") {
  bool is_capturing = true;
  Model model(2);
  model.options.find_unused_parameters = true;
  model.options.is_capturing = [&] { return is_capturing; };
  model.make();
  model.reducer->prepare_for_forward();
  REQUIRE_THROWS_WITH((model.weight(0) * 3).sum().backward(),
                      contains("whether another rank used the parameters that this one did not"));
  is_capturing = false;
  model.step(2, 4);
  CHECK(read_fake(model.gradient(1)) == Values{4, 4});
}
