#pragma once

namespace ddp::launcher {

/// Where this node's workers stand in the job, in one attempt.
struct Placement {
  int node_rank = 0;
  int nnodes = 1;
  int first_rank = 0;  ///< the rank of local rank 0
  int world_size = 1;

  int rank(int local_rank) const { return first_rank + local_rank; }
};

}  // namespace ddp::launcher
