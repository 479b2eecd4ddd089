#pragma once

#include <string>
#include <vector>

#include <ddp/process_group/store_channel.h>
#include <ddp/reducer/named_parameter.h>

namespace ddp::detail {

/// Checks that every C++ rank brings the same model: the number of parameters and buffers, each
/// one's name, shape, dtype and layout, which parameters are frozen, and the options that must be
/// alike (`options`, one line of text). Throws UsageError on *every* rank, with the rank that
/// differs and what differs. `scope` is the same on all ranks. Not a collective of the backend: a
/// mismatch leaves nothing begun on the wire.
void check_models_agree(StoreChannel& channel, const std::string& scope, const std::string& options,
                        const std::vector<NamedParameter>& parameters,
                        const std::vector<NamedParameter>& buffers);

}  // namespace ddp::detail
