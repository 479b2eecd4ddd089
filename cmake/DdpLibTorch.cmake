# ddp::libtorch: LibTorch's CPU half (torch_cpu, c10) as one interface target.
#
# LibTorch is looked for in CMAKE_PREFIX_PATH and Torch_ROOT (a libtorch folder or a Python wheel's
# `torch` folder), then in the virtual environment that scripts/bootstrap.sh made. LibTorch's own
# find_package(Torch) is not used: for a CUDA build it demands a CUDA toolkit, which the CPU half
# does not need.
#
# Result: target ddp::libtorch, variables DDP_LIBTORCH_ROOT and DDP_LIBTORCH_VERSION.

file(GLOB _ddp_venv_torch "${CMAKE_CURRENT_LIST_DIR}/../.deps/venv/lib/python3*/site-packages/torch")

set(_ddp_torch_hints ${Torch_ROOT} ${CMAKE_PREFIX_PATH} $ENV{Torch_ROOT} $ENV{CMAKE_PREFIX_PATH})
# A prefix path that names the folder of TorchConfig.cmake (torch/share/cmake) means its torch.
foreach(_hint IN LISTS _ddp_torch_hints)
  if(_hint MATCHES "^(.*)/share/cmake(/Torch)?/?$")
    list(APPEND _ddp_torch_hints "${CMAKE_MATCH_1}")
  endif()
endforeach()

find_path(DDP_LIBTORCH_ROOT
  NAMES include/torch/csrc/distributed/c10d/ProcessGroup.hpp
  HINTS ${_ddp_torch_hints} ${_ddp_recorded_libtorch} ${_ddp_venv_torch}
  NO_DEFAULT_PATH
  DOC "LibTorch's folder (holds include/ and lib/)")
if(NOT DDP_LIBTORCH_ROOT)
  message(FATAL_ERROR
    "LibTorch was not found.\n"
    "  Run scripts/bootstrap.sh, which brings it, or\n"
    "  name yours with -DCMAKE_PREFIX_PATH=/path/to/libtorch\n"
    "  (for a Python wheel: the folder that `python -c 'import torch; print(torch.__path__[0])'` prints).")
endif()

set(DDP_LIBTORCH_VERSION "unknown")
if(EXISTS "${DDP_LIBTORCH_ROOT}/include/torch/headeronly/version.h")
  set(_ddp_version_header "${DDP_LIBTORCH_ROOT}/include/torch/headeronly/version.h")
else()
  set(_ddp_version_header "${DDP_LIBTORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")
endif()
if(EXISTS "${_ddp_version_header}")
  file(STRINGS "${_ddp_version_header}" _ddp_version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" _ddp_version_numbers "${_ddp_version_lines}")
  list(JOIN _ddp_version_numbers "." DDP_LIBTORCH_VERSION)
endif()
if(NOT DDP_LIBTORCH_VERSION STREQUAL "unknown" AND DDP_LIBTORCH_VERSION VERSION_LESS 2.11)
  message(WARNING "LibTorch ${DDP_LIBTORCH_VERSION} is older than the oldest tested version, 2.11.0")
endif()
if(_ddp_recorded_version AND NOT DDP_LIBTORCH_VERSION STREQUAL _ddp_recorded_version)
  # It would link and then crash: LibTorch's C++ interface is not stable between its versions.
  message(FATAL_ERROR "This ddp was built with LibTorch ${_ddp_recorded_version}, found is ${DDP_LIBTORCH_VERSION} in ${DDP_LIBTORCH_ROOT}. "
    "Name the one that it was built with (CMAKE_PREFIX_PATH), or build ddp with the one that is found.")
endif()
message(STATUS "LibTorch ${DDP_LIBTORCH_VERSION}: ${DDP_LIBTORCH_ROOT}")

find_package(Threads REQUIRED)
if(NOT TARGET ddp::libtorch)
  foreach(_lib IN ITEMS torch_cpu c10)
    add_library(ddp::libtorch_${_lib} SHARED IMPORTED GLOBAL)
    set_target_properties(ddp::libtorch_${_lib} PROPERTIES
      IMPORTED_LOCATION "${DDP_LIBTORCH_ROOT}/lib/lib${_lib}.so")
  endforeach()
  add_library(ddp::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(ddp::libtorch SYSTEM INTERFACE
    "${DDP_LIBTORCH_ROOT}/include" "${DDP_LIBTORCH_ROOT}/include/torch/csrc/api/include")
  # fmt comes with LibTorch's headers and must be used header-only: a system fmt of another version
  # beside it would break the one-definition rule.
  target_compile_definitions(ddp::libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO FMT_HEADER_ONLY=1)
  target_link_libraries(ddp::libtorch INTERFACE ddp::libtorch_torch_cpu ddp::libtorch_c10 Threads::Threads)
endif()
