#pragma once

#include <ddp/process_group/nccl/nccl_plugin.h>

namespace ddp::detail {

/// Whether the plug-in's file is there; it is not opened.
bool nccl_plugin_exists();

/// The plug-in, opened with the first call: the one that the program links, the file that
/// DDP_NCCL_PLUGIN names, or libddp_nccl.so beside this library, or where the program's own
/// libraries are. `who` begins the text of a UsageError, which says what is missing.
const NcclPlugin& open_nccl_plugin(const std::string& who);

/// Whether the current CUDA stream is being captured into a graph: false where nothing has opened
/// the plug-in.
bool is_capturing_graph();

}  // namespace ddp::detail
