#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <ddp/distributed_data_parallel_options.h>
#include <ddp/reducer/reducer.h>

namespace ddp {

/// What `no_sync()` returns: gradients stay local until it is destroyed. May be nested. It keeps
/// the wrapper alive, and is destroyed on the thread that made it.
class [[nodiscard]] NoSyncGuard {
 public:
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  friend class DistributedDataParallelBase;
  explicit NoSyncGuard(std::shared_ptr<class DistributedDataParallelBase> model);
  std::shared_ptr<class DistributedDataParallelBase> model_;
  bool previous_;
};

/// The part of the wrapper that does not depend on the wrapped module's type.
///
/// Thread safety: used by the thread that trains, one at a time.
class DistributedDataParallelBase : public torch::nn::Module {
 public:
  /// The parameters, each once: LibTorch's own list has a parameter that is registered twice (tied
  /// weights) twice, and an optimizer would then step it twice.
  std::vector<at::Tensor> parameters() const;
  /// The same with their names, as Python's: "module.fc.weight".
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;

  /// Gradients accumulate locally while the guard lives; the first backward after it reduces the
  /// sum. A forward and its backward both belong inside, or both outside: the forward decides.
  ///
  ///     {
  ///       auto guard = model->no_sync();
  ///       loss(model->forward(first)).backward();
  ///     }
  ///     loss(model->forward(second)).backward();  // averages both
  NoSyncGuard no_sync();

  /// The flag behind `no_sync()`.
  void set_require_backward_grad_sync(bool require);
  bool require_backward_grad_sync() const { return require_sync_; }

  /// Replaces the averaging all-reduce of the buckets; once, on every rank alike. See
  /// <ddp/comm_hooks/default_hooks.h> and its neighbours for hooks to be had.
  ///
  ///     model->register_comm_hook(ddp::comm_hooks::fp16_compress());
  void register_comm_hook(CommHook hook);
  /// The same for a hook that was written for c10d's own reducer (a `c10d::CppCommHookInterface`).
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  const ProcessGroup& process_group() const { return group_; }
  const DistributedDataParallelOptions& options() const { return options_; }
  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                              DistributedDataParallelOptions options);

  /// Around the wrapped module's forward.
  void before_forward();

 private:
  /// What the model consists of, to see whether it still does.
  struct Part {
    std::shared_ptr<torch::nn::Module> module;
    std::vector<torch::nn::Module*> children;
    std::size_t parameters = 0;
  };
  void remember_model(const std::vector<NamedParameter>& parameters);
  void check_model_unchanged() const;
  std::string who() const;

  std::vector<NamedParameter> managed_parameters() const;
  std::vector<NamedParameter> managed_buffers() const;
  void check_ignored_names() const;
  void synchronize_module_states();
  void broadcast_buffers();

  DistributedDataParallelOptions options_;
  std::shared_ptr<torch::nn::Module> wrapped_;
  ProcessGroup group_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<Part> parts_;
  std::vector<NamedParameter> frozen_;
  std::unordered_set<const c10::TensorImpl*> known_;
  bool require_sync_ = true;
  bool buffers_are_due_ = true;
  std::uint64_t passes_seen_ = 0;
};

}  // namespace ddp
