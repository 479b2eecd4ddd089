#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddp {

/// How ranks' values are combined: `ddp::ReduceOp::SUM`, `AVG` (floating point), `PRODUCT`, `MIN`,
/// `MAX`, and for integers `BAND`, `BOR`, `BXOR`. c10d's own type. Of bools, `SUM` and `MAX` are
/// "or", `PRODUCT` and `MIN` "and"; of complex numbers there are `SUM` and `AVG`.
using ReduceOp = c10d::ReduceOp;

}  // namespace ddp
