#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <ddp/logging_data.h>
#include <ddp/reducer/bucket.h>
#include <ddp/reducer/bucket_assignment.h>
#include <ddp/reducer/comm_hook.h>
#include <ddp/reducer/failure_channel.h>
#include <ddp/reducer/unfinished_works.h>

namespace ddp {

struct ReducerOptions {
  /// Bytes at which the first and the other buckets are closed, once the order of readiness is
  /// known.
  std::size_t first_bucket_cap = std::size_t{1} << 20;
  std::size_t bucket_cap = std::size_t{25} << 20;
  /// Parameters without a gradient contribute zeros instead of being an error.
  bool find_unused_parameters = false;
  /// Every pass uses the same parameters, equally often: see Note [Static graph].
  bool static_graph = false;
  /// A dtype that floating parameters may have in place of their own, from a forward on; their
  /// gradients are averaged in their own.
  std::optional<at::ScalarType> lowered_dtype;
  /// Refuses what Python's ranks would leave local: a second backward after one forward.
  bool python_compatible = false;
  /// The next pass may overwrite gradients that the program still holds.
  bool gradient_as_bucket_view = false;
  /// Whether the current stream is being captured into a CUDA graph; empty: never.
  std::function<bool()> is_capturing;
};

/// Averages the parameters' gradients over the ranks of a process group while backward runs.
///
/// Hooks on the parameters' gradient accumulators feed buckets; a full bucket's all-reduce is
/// launched at once, in the order of the buckets on every rank. At the end of backward the reducer
/// waits for them; then every gradient is its average. See Note [Reducer state machine].
///
/// Thread safety: hooks may come from any of autograd's threads; all other calls from the thread
/// that trains. Errors: see `prepare_for_forward`; errors of a backward pass are thrown by
/// `backward()` itself.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// `parameters`: leaf tensors that require gradients, the same on every rank, without duplicates.
  /// `channel` may be null: a pass that fails then always ends the group. `scope` names this
  /// reducer on the channel, alike on all ranks.
  static std::shared_ptr<Reducer> create(std::vector<NamedParameter> parameters,
                                         c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                         std::shared_ptr<FailureChannel> channel, std::string scope,
                                         const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// To be called before every forward that records a graph: the first such call after the first
  /// reduced pass lays the buckets out anew, in rank 0's order of readiness (a collective).
  /// Throws UsageError where the pass before never ended or a parameter has become another one
  /// (dtype, device, shape), CommunicationError where the group failed.
  void prepare_for_forward();

  /// Whether this is called from inside a backward that is being reduced, as by a checkpoint that
  /// runs a forward again.
  bool is_in_backward() const;

  /// Whether the hooks that fire from now on start and feed a reduction, as they do at first
  /// (false: gradients stay local).
  void set_synchronize(bool synchronize);

  /// Whether the next `prepare_for_forward` lays the buckets out anew.
  bool rebuild_is_due() const;

  /// Calls `announce` at the beginning of every pass, before its collectives, from the thread that
  /// runs backward; it returns the number that gradients are divided by. What it throws leaves that
  /// backward(). Empty: nothing is called, and the world size divides.
  void set_before_pass(std::function<int()> announce);

  /// Calls `act` at the end of every backward that gave a gradient, reduced or local, also of one
  /// that failed in a pass. It must not call the reducer.
  void set_after_backward(std::function<void()> act);

  /// Takes part in the others' pass with zeros, in place of a backward; no gradient here changes.
  void shadow_pass();

  /// The number of passes that were reduced to their end.
  std::uint64_t finished_passes() const { return finished_passes_.load(); }

  /// Replaces the averaging all-reduce. Throws UsageError where one is registered already, in the
  /// middle of a backward pass, or where `hook` is empty.
  void register_comm_hook(CommHook hook);

  /// The layout in force: for each bucket, positions in the parameter list.
  BucketAssignment bucket_assignment() const;
  bool has_rebuilt_buckets() const;
  /// Fills in what the reducer knows of it: buckets, passes, times.
  void describe_in(LoggingData& data) const;

 private:
  struct EndOfBackward;
  using Clock = std::chrono::steady_clock;
  /// What LibTorch gives the name to in each of its versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Hook {
    Accumulator accumulator;
    std::uintptr_t key = 0;
    // As the parameter was when it was wrapped.
    at::TensorOptions options;
    std::vector<std::int64_t> sizes;
  };
  struct InFlight {
    c10::intrusive_ptr<c10d::Work> work;
    c10::intrusive_ptr<c10::ivalue::Future> future;  // of a hook
  };

  Reducer(std::vector<NamedParameter> parameters,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group,
          std::shared_ptr<FailureChannel> channel, std::string scope,
          const ReducerOptions& options);

  void install_hook(std::size_t index);
  void follow_parameters();
  bool rebuild_due() const;
  void on_gradient(std::size_t index, bool defined);
  void begin_pass();
  void open_pass();
  void queue_end_of_backward();
  void continue_in_outer_task(std::function<void()> act);
  void queue_end_of_local_backward();
  void end_of_local_backward();
  bool is_learning() const { return options_.static_graph && !learned_; }
  bool finds_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  void count_firing(std::size_t index);
  void mark_ready(std::size_t index);
  void mark_all_ready();
  [[noreturn]] void refuse_gradient(const std::string& why);
  void launch_full_buckets();
  void launch(std::size_t bucket);
  void launch_hook(std::size_t bucket);
  c10::intrusive_ptr<c10d::Work> start_all_reduce(std::size_t bucket);
  bool averages_natively(const Bucket& bucket) const;
  double factor_for(const Bucket& bucket) const;
  void refuse_capture(const std::string& what);
  void check_device_works();
  void end_of_backward(std::uint64_t pass, int task);
  [[noreturn]] void fail_incomplete_pass();
  void backward_died(std::uint64_t pass);
  void finish_pass();
  void start_used_map();
  void wait_for_used_map();
  void wait_for(std::size_t bucket);
  void wait_for_hook(std::size_t bucket);
  void record_times(Clock::time_point computed);
  void close_pass();
  void drop_gradients();
  bool fail_pass(const std::string& report) noexcept;
  void complete_on_the_wire();
  [[noreturn]] void communication_failed(const std::string& what, const std::string& why);
  [[noreturn]] void communication_failed(const std::string& report);

  BucketAssignment first_assignment() const;
  void set_buckets(BucketAssignment assignment);
  std::vector<std::int64_t> bucket_sizes() const;
  void rebuild_buckets();
  BucketAssignment agree_with_rank_0(const BucketAssignment& own);

  std::string describe(std::size_t bucket) const;
  std::string describe_missing() const;
  std::string who() const;

  const std::vector<NamedParameter> parameters_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const std::shared_ptr<FailureChannel> channel_;
  const std::string scope_;
  const ReducerOptions options_;

  mutable std::mutex mutex_;
  std::vector<Hook> hooks_;  // by parameter
  bool synchronize_ = true;
  bool is_armed_ = false;  // a forward came since the last pass
  CommHook hook_;
  std::function<int()> before_pass_;
  std::function<void()> after_backward_;

  const detail::MessageAllocator message_allocator_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;    // by parameter
  std::vector<std::size_t> position_of_;  // in its bucket, by parameter
  bool rebuilt_ = false;
  std::vector<std::size_t> arrival_;  // parameters in the order of readiness of the first pass

  // A static graph: how often each parameter's hook fires in a pass, and which parameters some rank
  // uses, both as found in the first pass.
  bool learned_ = false;
  std::vector<std::uint32_t> firings_;
  std::vector<std::int32_t> used_anywhere_;

  // This pass.
  bool open_ = false;
  std::uint64_t pass_ = 0;
  double factor_ = 1;  // that gradients are multiplied by
  std::size_t next_bucket_ = 0;
  std::vector<std::uint8_t> ready_;  // by parameter
  std::vector<std::int32_t> used_;   // by parameter; since the last reduced pass
  std::vector<int> queued_tasks_;    // graph tasks at whose end we are called
  std::vector<InFlight> in_flight_;  // by bucket
  std::vector<std::uint32_t> firings_left_;
  bool native_average_ = false;  // the backend divides where it can, and not the buckets
  at::Tensor used_map_;
  c10::intrusive_ptr<c10d::Work> used_work_;
  std::string pending_report_;  // why a hook threw

  detail::UnfinishedWorks device_works_;  // over which the thread has gone on
  std::string failure_;                   // why the group is not usable any more
  std::atomic<std::uint64_t> finished_passes_{0};

  // For `describe_in`.
  Clock::time_point forward_begin_;
  Clock::time_point backward_begin_;
  Clock::time_point comm_begin_;
  StepTimes last_times_;
  StepTimes all_times_;
  std::int64_t unused_bytes_ = 0;
  std::vector<std::int64_t> first_bucket_sizes_;
};

}  // namespace ddp
