#pragma once

#include <ddp/process_group/shm/kernels.h>

namespace ddp::shm {

// The same loops, compiled for three instruction sets. The last two exist where DDP_SHM_X86 is
// defined.
const Kernels::Table& baseline_table();
const Kernels::Table& avx2_table();
const Kernels::Table& avx512_table();

}  // namespace ddp::shm
