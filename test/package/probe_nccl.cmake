# What ddp_find_nccl says of the LibTorch in ROOT.
list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../cmake")
include(DdpFindNccl)
ddp_find_nccl("${ROOT}")
message(STATUS "version: ${DDP_NCCL_VERSION}; problem: ${DDP_NCCL_PROBLEM}; folders: ${DDP_NCCL_INCLUDE_DIRS}")
