#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <ddp/comm_hooks/power_sgd_state.h>

namespace ddp::comm_hooks {
namespace {

using detail::PowerSGDState;

/// Gradients of one shape, or one alone, as batch x rows x columns, and its factors: batch x rows x
/// rank and batch x columns x rank, parts of the bucket's memory.
struct Matrices {
  at::Tensor values;
  at::Tensor p;
  at::Tensor q;
  /// Where `values` is a copy: the gradients that it was made of.
  std::vector<at::Tensor> originals;

  std::int64_t rank(std::int64_t limit) const {
    return std::min({values.size(1), values.size(2), limit});
  }
};

class Compression {
 public:
  Compression(PowerSGDState& state, std::size_t bucket, at::Tensor buffer,
              const std::vector<at::Tensor>& gradients)
      : state_(state), options_(state.options), bucket_(bucket), buffer_(std::move(buffer)) {
    sort_out(gradients);
  }

  at::Tensor run() {
    auto& memory = state_.memory[bucket_];
    at::Tensor before;
    if (options_.use_error_feedback()) {
      state_.add_error(memory, buffer_);
      before = buffer_.clone();
    }
    stack();
    std::vector<at::Tensor> flat;
    for (const auto& tensor : whole_) {
      flat.push_back(tensor.view(-1));
    }
    const auto whole = flat.empty() ? at::empty({0}, buffer_.options()) : at::cat(flat);
    start_from(memory);

    for (auto& matrices : matrices_) {
      at::bmm_out(matrices.p, matrices.values, matrices.q);
    }
    // In this order on the wire, as Python's.
    const auto whole_work = detail::start_sum(state_.group, whole);
    const auto p_work = detail::start_sum(state_.group, memory.p);
    state_.worker.wait(*whole_work);
    whole.div_(state_.group->getSize());
    std::int64_t offset = 0;
    for (const auto& tensor : whole_) {
      tensor.copy_(whole.narrow(0, offset, tensor.numel()).view_as(tensor));
      offset += tensor.numel();
    }
    state_.worker.wait(*p_work);
    for (auto& matrices : matrices_) {
      detail::orthogonalize(matrices.p, options_.orthogonalization_epsilon());
      at::bmm_out(matrices.q, matrices.values.transpose(1, 2), matrices.p);
    }
    state_.worker.wait(*detail::start_sum(state_.group, memory.q));
    memory.q.div_(state_.group->getSize());
    for (auto& matrices : matrices_) {
      at::bmm_out(matrices.values, matrices.p, matrices.q.transpose(1, 2));
      for (std::size_t i = 0; i < matrices.originals.size(); ++i) {
        matrices.originals[i].copy_(matrices.values[static_cast<std::int64_t>(i)]);
      }
    }
    if (options_.use_error_feedback()) {
      memory.error = before - buffer_;
    }
    if (!options_.warm_start()) {
      memory.p.reset();
      memory.q.reset();
    }
    return buffer_;
  }

 private:
  bool is_worth_it(const at::Tensor& gradient) const {
    if (gradient.dim() == 0 || gradient.numel() == 0) {
      return false;
    }
    const auto rows = gradient.size(0);
    const auto columns = gradient.numel() / rows;
    const auto rank = std::min({rows, columns, options_.matrix_approximation_rank()});
    return static_cast<double>((rows + columns) * rank) * options_.min_compression_rate() <
           static_cast<double>(gradient.numel());
  }

  /// Matrices of the same shape stand together, in the order of the first of each shape: so do
  /// Python's, and the random numbers are dealt in that order.
  void sort_out(const std::vector<at::Tensor>& gradients) {
    for (const auto& gradient : gradients) {
      if (!is_worth_it(gradient)) {
        whole_.push_back(gradient);
        continue;
      }
      const auto matrix = gradient.view({gradient.size(0), -1});
      const auto like = std::find_if(by_shape_.begin(), by_shape_.end(), [&](const auto& others) {
        return others.front().sizes() == matrix.sizes();
      });
      if (like == by_shape_.end()) {
        by_shape_.push_back({matrix});
      } else {
        like->push_back(matrix);
      }
    }
  }

  void stack() {
    for (const auto& same : by_shape_) {
      if (options_.batch_tensors_with_same_shape() && same.size() > 1) {
        matrices_.push_back({at::stack(same), {}, {}, same});
        continue;
      }
      for (const auto& matrix : same) {
        matrices_.push_back({matrix.unsqueeze(0), {}, {}, {}});
      }
    }
  }

  /// Gives the matrices their factors: from the step before, or random ones.
  void start_from(detail::BucketMemory& memory) {
    const bool is_first = !memory.p.defined();
    if (is_first) {
      std::int64_t p_size = 0;
      std::int64_t q_size = 0;
      for (const auto& matrices : matrices_) {
        const auto rank = matrices.rank(options_.matrix_approximation_rank());
        p_size += matrices.values.size(0) * matrices.values.size(1) * rank;
        q_size += matrices.values.size(0) * matrices.values.size(2) * rank;
      }
      memory.p = at::empty({p_size}, buffer_.options());
      memory.q = at::empty({q_size}, buffer_.options());
    }
    std::int64_t p_offset = 0;
    std::int64_t q_offset = 0;
    const auto take = [](const at::Tensor& from, std::int64_t* offset, std::int64_t batch,
                         std::int64_t rows, std::int64_t rank) {
      const auto part = from.narrow(0, *offset, batch * rows * rank);
      *offset += part.numel();
      return part.view({batch, rows, rank});
    };
    const auto generator = is_first ? state_.seeds.next_generator() : at::Generator();
    for (auto& matrices : matrices_) {
      const auto batch = matrices.values.size(0);
      const auto rank = matrices.rank(options_.matrix_approximation_rank());
      matrices.p = take(memory.p, &p_offset, batch, matrices.values.size(1), rank);
      matrices.q = take(memory.q, &q_offset, batch, matrices.values.size(2), rank);
      if (is_first) {
        detail::fill_randomly(matrices.q, generator);
      }
      detail::orthogonalize(matrices.q, options_.orthogonalization_epsilon());
    }
  }

  PowerSGDState& state_;
  const PowerSGDOptions& options_;
  std::size_t bucket_;
  at::Tensor buffer_;
  std::vector<at::Tensor> whole_;
  std::vector<std::vector<at::Tensor>> by_shape_;
  std::vector<Matrices> matrices_;
};

}  // namespace

CommHook power_sgd(const PowerSGDOptions& options, const ProcessGroup& group) {
  const auto state = std::make_shared<PowerSGDState>(options, group, "power_sgd");
  return [state](c10d::GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const auto buffer = bucket.getBuffer();
    if (state->is_before_start(bucket) || buffer.is_complex()) {
      return detail::start_average(state->group, buffer);
    }
    // The state outlives its worker's jobs, which must not hold it: the last of them would join its
    // own thread.
    auto compression =
        std::make_shared<Compression>(*state, bucket.getIndex(), buffer, bucket.getGradients());
    return state->worker.run(buffer, [compression] { return compression->run(); });
  };
}

}  // namespace ddp::comm_hooks
