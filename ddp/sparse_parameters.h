#pragma once

#include <vector>

#include <torch/nn/module.h>

#include <ddp/reducer/named_parameter.h>

namespace ddp::detail {

/// Sets `expects_sparse` of those `parameters` that are the weight of an Embedding or EmbeddingBag
/// with `sparse(true)` in `module`, as Python's DistributedDataParallel finds them.
void mark_sparse_parameters(torch::nn::Module& module, std::vector<NamedParameter>& parameters);

}  // namespace ddp::detail
