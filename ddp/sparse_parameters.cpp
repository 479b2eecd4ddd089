#include <unordered_set>

#include <torch/nn/modules/embedding.h>

#include <ddp/sparse_parameters.h>

namespace ddp::detail {

void mark_sparse_parameters(torch::nn::Module& module, std::vector<NamedParameter>& parameters) {
  std::unordered_set<const c10::TensorImpl*> sparse;
  for (const auto& part : module.modules()) {
    if (const auto* embedding = part->as<torch::nn::EmbeddingImpl>()) {
      if (embedding->options.sparse()) {
        sparse.insert(embedding->weight.unsafeGetTensorImpl());
      }
    } else if (const auto* bag = part->as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) {
        sparse.insert(bag->weight.unsafeGetTensorImpl());
      }
    }
  }
  for (auto& parameter : parameters) {
    parameter.expects_sparse = sparse.count(parameter.tensor.unsafeGetTensorImpl()) != 0;
  }
}

}  // namespace ddp::detail
