#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <ddp/distributed_data_parallel_options.h>
#include <ddp/input_place.h>
#include <ddp/join.h>
#include <ddp/logging_data.h>
#include <ddp/reducer/comm_hook.h>
#include <ddp/reducer/named_parameter.h>

namespace ddp {

class Reducer;

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

  /// Runs `body`, in which ranks may train for different numbers of steps: a rank whose `body` has
  /// returned takes part in the others' collectives with zeros until all have finished. Then all
  /// ranks have the parameters and buffers of a rank that finished last. Called by every rank, with
  /// the same options.
  ///
  ///     model->join([&] {
  ///       for (auto& batch : *loader) { ... }
  ///     });
  ///
  /// Only the wrapper's own collectives are answered: `body` starts no others. Throws what `body`
  /// throws (the rank then leaves the group, so that the others end as well), UsageError on every
  /// rank where the ranks that have input do different things.
  void join(const std::function<void()>& body, const JoinOptions& options = {});

  /// Replaces the averaging all-reduce of the buckets; once, on every rank alike. See
  /// <ddp/comm_hooks/default_hooks.h> and its neighbours for hooks to be had.
  ///
  ///     model->register_comm_hook(ddp::comm_hooks::fp16_compress());
  void register_comm_hook(CommHook hook);
  /// The same for a hook that was written for c10d's own reducer (a `c10d::CppCommHookInterface`).
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  /// What the wrapper is made of and has measured; prints itself.
  LoggingData logging_data() const;

  const ProcessGroup& process_group() const { return group_; }
  const DistributedDataParallelOptions& options() const { return options_; }
  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module,
                              DistributedDataParallelOptions options);

  /// Around the wrapped module's forward; `returned`: it threw nothing.
  void before_forward();
  void after_forward(bool returned);
  /// What inputs are brought to.
  const detail::InputPlace& input_place() const { return input_place_; }

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
  void check_devices(const std::vector<NamedParameter>& parameters);
  void check_ranks_are_native() const;
  void check_mixed_precision() const;
  void set_up_mixed_precision(const std::vector<NamedParameter>& parameters);
  void synchronize_module_states(int root);
  void broadcast_buffers(int root);
  void prepare_forward(bool is_new_step);
  void join_shadow();

  DistributedDataParallelOptions options_;
  std::shared_ptr<torch::nn::Module> wrapped_;
  ProcessGroup group_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<Part> parts_;
  std::vector<NamedParameter> frozen_;
  std::unordered_set<const c10::TensorImpl*> known_;
  detail::InputPlace input_place_;
  std::shared_ptr<detail::LoweredParameters> lowered_;
  std::unique_ptr<detail::JoinSession> join_;
  bool require_sync_ = true;
  bool buffers_are_due_ = true;
  std::uint64_t passes_seen_ = 0;
};

}  // namespace ddp
