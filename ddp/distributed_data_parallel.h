#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/pimpl.h>

#include <ddp/distributed_data_parallel_base.h>
#include <ddp/input_place.h>

namespace ddp {

namespace detail {

/// Takes the place of an explicit template argument: `forward<T>(...)` then means the other
/// overload.
struct Deduced {};

template <class Module, class = void>
struct ImplOf {
  using type = Module;
};

template <class Module>
struct ImplOf<Module, std::void_t<typename Module::ContainedType>> {
  using type = typename Module::ContainedType;
};

}  // namespace detail

/// The module behind the holder `DistributedDataParallel`. `Impl` is the wrapped module's class.
template <class Impl>
class DistributedDataParallelImpl : public DistributedDataParallelBase {
 public:
  explicit DistributedDataParallelImpl(std::shared_ptr<Impl> module,
                                       DistributedDataParallelOptions options = {})
      : DistributedDataParallelBase(module, std::move(options)), module_(std::move(module)) {}

  /// Runs the wrapped module's forward; takes and returns whatever that does. In a step's first
  /// forward the buffers are synchronised; the backward of a forward averages the gradients.
  /// Under `torch::NoGradGuard` it communicates nothing, and one rank alone may call it.
  template <detail::Deduced = detail::Deduced{}, class... Args>
  auto forward(Args&&... args)
      -> decltype(std::declval<Impl&>().forward(std::forward<Args>(args)...)) {
    const Forward around(*this);
    if (input_place()) {
      return module_->forward(
          detail::AtPlace<Args>(std::forward<Args>(args), input_place()).get()...);
    }
    return module_->forward(std::forward<Args>(args)...);
  }

  /// The same for modules whose forward is told its result's type, as `torch::nn::Sequential`'s is:
  /// `model->forward<std::tuple<torch::Tensor, torch::Tensor>>(input)`.
  template <class Result, class... Args>
  auto forward(Args&&... args)
      -> decltype(std::declval<Impl&>().template forward<Result>(std::forward<Args>(args)...)) {
    const Forward around(*this);
    if (input_place()) {
      return module_->template forward<Result>(
          detail::AtPlace<Args>(std::forward<Args>(args), input_place()).get()...);
    }
    return module_->template forward<Result>(std::forward<Args>(args)...);
  }

  /// The wrapped module. Its own forward communicates nothing, but a backward that reaches the
  /// parameters is reduced whichever way its forward went, unless the last forward of the wrapper
  /// was under `no_sync`: do it on every rank.
  const std::shared_ptr<Impl>& module() const { return module_; }

 private:
  /// What stands around the module's forward.
  class Forward {
   public:
    explicit Forward(DistributedDataParallelImpl& model) : model_(model) {
      model_.before_forward();
    }
    ~Forward() { model_.after_forward(std::uncaught_exceptions() == exceptions_); }
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    DistributedDataParallelImpl& model_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  std::shared_ptr<Impl> module_;
};

/// Data-parallel training of any `torch::nn` module: each rank runs forward and backward on its own
/// part of the batch, and the gradients are averaged over the ranks while backward runs.
///
/// `Module` is a holder (`Net`, `torch::nn::Sequential`) or an Impl class; it is deduced from the
/// argument. Construction is collective: it verifies that all ranks bring the same model and gives
/// rank 0's parameters and buffers to all. The module is registered as the child `module`.
///
///     Net net;
///     ddp::DistributedDataParallel model(net);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     auto loss = torch::mse_loss(model->forward(input), target);
///     loss.backward();                 // gradients are averages now
///     optimizer.step();
///
/// Thread safety: as a module's, one thread trains. Errors: UsageError (models differ between
/// ranks, nothing requires a gradient, an unused parameter) and CommunicationError (a rank left),
/// from the constructor, `forward` and the loss's `backward()`.
template <class Module>
class DistributedDataParallel
    : public torch::nn::ModuleHolder<
          DistributedDataParallelImpl<typename detail::ImplOf<Module>::type>> {
 public:
  using Impl = typename detail::ImplOf<Module>::type;
  using Base = torch::nn::ModuleHolder<DistributedDataParallelImpl<Impl>>;

  /// An empty holder, to be assigned later.
  DistributedDataParallel(std::nullptr_t) : Base(nullptr) {}

  explicit DistributedDataParallel(
      const Module& module,
      DistributedDataParallelOptions options = {}) requires(!std::is_same_v<Module, Impl>)
      : Base(std::make_shared<DistributedDataParallelImpl<Impl>>(
            module.is_empty() ? nullptr : module.ptr(), std::move(options))) {}

  explicit DistributedDataParallel(std::shared_ptr<Impl> module,
                                   DistributedDataParallelOptions options = {})
      : Base(std::make_shared<DistributedDataParallelImpl<Impl>>(std::move(module),
                                                                 std::move(options))) {}

  /// The same as `model->forward(...)`.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return (*this)->forward(std::forward<Args>(args)...);
  }
};

template <class Module>
DistributedDataParallel(std::shared_ptr<Module>) -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(std::shared_ptr<Module>, DistributedDataParallelOptions)
    -> DistributedDataParallel<Module>;
template <class Module>
requires(!std::is_same_v<Module, typename detail::ImplOf<Module>::type>)
    DistributedDataParallel(Module)
->DistributedDataParallel<Module>;
template <class Module>
requires(!std::is_same_v<Module, typename detail::ImplOf<Module>::type>)
    DistributedDataParallel(Module, DistributedDataParallelOptions)
->DistributedDataParallel<Module>;

}  // namespace ddp
