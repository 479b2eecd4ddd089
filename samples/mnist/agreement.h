#pragma once

#include <cstdint>

#include <torch/nn/module.h>

/// A checksum over the bits of the module's parameters, the same on all ranks: it compares them
/// parameter by parameter and throws std::runtime_error, naming the parameter, where ranks differ.
/// Every rank calls it. Without a process group there is nothing to compare.
std::uint64_t agreed_checksum(const torch::nn::Module& module);
