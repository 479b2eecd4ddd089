#pragma once

// Every collective. All ranks of the group call the same ones in the same order, with tensors of
// the same shape and dtype; `src` and `dst` are ranks *in the group* (Python's are ranks of the
// default group; ddp::get_group_rank converts).
//
// Tensors are changed in place, as in Python. Every dtype can be moved (broadcast, gather, send
// ...); float, double, half, bfloat16, int8, uint8, int32, int64, bool and (SUM, AVG) complex can
// be reduced.
//
// Thread safety: none. Calls on one group from several threads would pair up at random; each thread
// may have a group of its own.
//
// Errors: UsageError before anything is sent (no group, a rank out of range, tensors that do not
// fit); the group stays usable. CommunicationError afterwards (a rank left, or did not answer
// within the group's timeout); this rank has then left the group, so that the others end too, and
// the text says what is known of them. Shapes and dtypes that differ between ranks are refused on
// all of them with TORCH_DISTRIBUTED_DEBUG=DETAIL; without it, some rank gets wrong values, or Gloo
// ends the process.

#include <ddp/process_group/all_to_all.h>
#include <ddp/process_group/barrier.h>
#include <ddp/process_group/gather.h>
#include <ddp/process_group/object_collectives.h>
#include <ddp/process_group/point_to_point.h>
#include <ddp/process_group/reduce.h>
