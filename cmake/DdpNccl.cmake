# Whether the NCCL plug-in is built: DDP_WITH_NCCL, and what there is to build it from. Sets
# DDP_HAS_NCCL, and what DdpFindNccl.cmake says.
include(DdpFindNccl)

set(DDP_WITH_NCCL "AUTO" CACHE STRING "Build the NCCL plug-in ddp::nccl: AUTO (where what it needs is found), ON, OFF")
set_property(CACHE DDP_WITH_NCCL PROPERTY STRINGS AUTO ON OFF)

set(DDP_HAS_NCCL OFF)
if(DDP_WITH_NCCL STREQUAL "AUTO" OR DDP_WITH_NCCL)
  ddp_find_nccl("${DDP_LIBTORCH_ROOT}")
  if(NOT DDP_NCCL_PROBLEM)
    set(DDP_HAS_NCCL ON)
    message(STATUS "NCCL ${DDP_NCCL_VERSION}: ddp::nccl is built")
  elseif(DDP_WITH_NCCL STREQUAL "AUTO")
    message(STATUS "Without NCCL: ${DDP_NCCL_PROBLEM}")
  else()
    message(FATAL_ERROR "DDP_WITH_NCCL=${DDP_WITH_NCCL}, but ${DDP_NCCL_PROBLEM}")
  endif()
endif()
