#include <cstddef>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <ddp/error.h>
#include <ddp/nn/convert_sync_batchnorm.h>
#include <ddp/process_group/group_registry.h>

namespace ddp::detail {
namespace {

using torch::nn::BatchNorm1dImpl;
using torch::nn::BatchNorm2dImpl;
using torch::nn::BatchNorm3dImpl;
using torch::nn::Module;
using torch::nn::SequentialImpl;

template <class Impl>
bool is_exactly(const Module& module) {
  return typeid(module) == typeid(Impl);
}

bool is_batch_norm(const Module& module) {
  return is_exactly<BatchNorm1dImpl>(module) || is_exactly<BatchNorm2dImpl>(module) ||
         is_exactly<BatchNorm3dImpl>(module);
}

/// Of a class of the program's, whose own code a conversion would lose.
bool is_derived_batch_norm(const Module& module) {
  return !is_batch_norm(module) && (dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr ||
                                    dynamic_cast<const BatchNorm2dImpl*>(&module) != nullptr ||
                                    dynamic_cast<const BatchNorm3dImpl*>(&module) != nullptr);
}

template <class Impl>
std::shared_ptr<SyncBatchNormImpl> synchronized(const Impl& norm, const ProcessGroup& group) {
  auto result = std::make_shared<SyncBatchNormImpl>(
      SyncBatchNormOptions(norm.options).process_group(group),
      BatchNormState{norm.weight, norm.bias, norm.running_mean, norm.running_var,
                     norm.num_batches_tracked});
  result->train(norm.is_training());
  return result;
}

std::shared_ptr<SyncBatchNormImpl> synchronized(const Module& norm, const ProcessGroup& group) {
  if (is_exactly<BatchNorm1dImpl>(norm)) {
    return synchronized(static_cast<const BatchNorm1dImpl&>(norm), group);
  }
  if (is_exactly<BatchNorm2dImpl>(norm)) {
    return synchronized(static_cast<const BatchNorm2dImpl&>(norm), group);
  }
  return synchronized(static_cast<const BatchNorm3dImpl&>(norm), group);
}

/// What is to be replaced in a module, found before anything is.
class Plan {
 public:
  void add_children_of(Module& parent, const std::string& prefix) {
    auto* const sequential = dynamic_cast<SequentialImpl*>(&parent);
    std::size_t position = 0;
    for (const auto& child : parent.named_children()) {
      const auto name = prefix + child.key();
      const auto& module = child.value();
      const bool runs = sequential != nullptr && find(*sequential, module, position);
      if (is_derived_batch_norm(*module)) {
        refused_.push_back(fmt::format("{} ({}, a class of its own)", name, module->name()));
      } else if (!is_batch_norm(*module)) {
        if (seen_.insert(module.get()).second) {
          add_children_of(*module, name + ".");
        }
      } else if (runs) {
        entries_.push_back(
            {sequential, static_cast<std::ptrdiff_t>(position), child.key(), module});
      } else {
        refused_.push_back(fmt::format("{} ({}, in {})", name, module->name(), parent.name()));
      }
      position += runs ? 1 : 0;
    }
  }

  void check() const {
    if (!refused_.empty()) {
      throw UsageError(fmt::format(
          "convert_sync_batchnorm: expected batch norms that stand directly in a "
          "torch::nn::Sequential; found {} of which the running code holds the type, so that they "
          "cannot be replaced: {}. Nothing was changed. Declare each as ddp::SyncBatchNorm (the "
          "same options and the same names in checkpoints)",
          refused_.size(), fmt::join(refused_, ", ")));
    }
  }

  void carry_out(const ProcessGroup& group) const {
    std::unordered_map<const Module*, std::shared_ptr<SyncBatchNormImpl>> made;
    for (const auto& entry : entries_) {
      auto& replacement = made[entry.norm.get()];
      if (!replacement) {
        replacement = synchronized(*entry.norm, group);
      }
      // Both what forward runs and what is registered.
      *(entry.parent->begin() + entry.index) = torch::nn::AnyModule(replacement);
      entry.parent->replace_module(entry.name, replacement);
    }
  }

 private:
  struct Entry {
    SequentialImpl* parent;
    std::ptrdiff_t index;
    std::string name;
    std::shared_ptr<Module> norm;
  };

  /// Moves `position` on to where the forward of `parent` runs `child`. False: it does not (a child
  /// that a class derived from Sequential registered for itself, or that was replaced).
  static bool find(const SequentialImpl& parent, const std::shared_ptr<Module>& child,
                   std::size_t& position) {
    for (std::size_t index = position; index < parent.size(); ++index) {
      if (parent.ptr(index) == child) {
        position = index;
        return true;
      }
    }
    return false;
  }

  std::unordered_set<const Module*> seen_;
  std::vector<Entry> entries_;
  std::vector<std::string> refused_;
};

}  // namespace

std::shared_ptr<Module> convert_batch_norms(const std::shared_ptr<Module>& module,
                                            const ProcessGroup& group) {
  if (!module) {
    throw UsageError("convert_sync_batchnorm: the module is empty; construct it first");
  }
  if (group) {
    resolve_group(group);
  }
  if (is_batch_norm(*module)) {
    return synchronized(*module, group);
  }
  if (is_derived_batch_norm(*module)) {
    throw UsageError(fmt::format(
        "convert_sync_batchnorm: expected a torch::nn::BatchNorm or a module with some; found a "
        "{}, "
        "a class of its own, whose code would be lost; let it hold a ddp::SyncBatchNorm",
        module->name()));
  }
  Plan plan;
  plan.add_children_of(*module, "");
  plan.check();
  plan.carry_out(group);
  return module;
}

}  // namespace ddp::detail
