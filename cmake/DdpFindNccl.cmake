# ddp_find_nccl(ROOT): what the NCCL plug-in is built from, beside the LibTorch in ROOT. Sets in the
# caller's scope:
#   DDP_NCCL_PROBLEM        why it cannot be built; empty where it can
#   DDP_NCCL_INCLUDE_DIRS   the folders of the CUDA and NCCL headers
#   DDP_NCCL_VERSION        NCCL's version, of headers and library
# Looked for first in the wheels beside LibTorch (nvidia/...), whose NCCL is the one that LibTorch loads, then in
# a CUDA toolkit (CUDAToolkit_ROOT, CUDA_HOME, /usr/local/cuda) and NCCL_ROOT. Headers and library of
# different NCCL versions end the configuration: LibTorch's classes hold NCCL's structures.

function(_ddp_nccl_header_version header result)
  file(STRINGS "${header}" lines REGEX "^#define +NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
  list(JOIN numbers "." version)
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

function(_ddp_nccl_library_version library result)
  get_filename_component(real "${library}" REALPATH)
  if(real MATCHES "libnccl\\.so\\.([0-9]+\\.[0-9]+\\.[0-9]+)$")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    return()
  endif()
  # What it prints with NCCL_DEBUG=VERSION.
  file(STRINGS "${real}" words REGEX "NCCL version [0-9]+\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
  if(words MATCHES "NCCL version ([0-9]+\\.[0-9]+\\.[0-9]+)")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

function(ddp_find_nccl root)
  set(DDP_NCCL_PROBLEM "" PARENT_SCOPE)
  set(DDP_NCCL_INCLUDE_DIRS "" PARENT_SCOPE)
  set(DDP_NCCL_VERSION "" PARENT_SCOPE)
  if(NOT EXISTS "${root}/lib/libtorch_cuda.so")
    set(DDP_NCCL_PROBLEM "the LibTorch in ${root} is built without CUDA: take one that is built with it (CMAKE_PREFIX_PATH)" PARENT_SCOPE)
    return()
  endif()
  file(GLOB wheels "${root}/../nvidia/*")
  set(places ${wheels} ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} /usr/local/cuda)
  set(folders "")
  foreach(header IN ITEMS cuda_runtime_api.h cublas_v2.h cusparse.h cusolverDn.h)
    find_path(folder ${header} PATHS ${places} PATH_SUFFIXES include targets/x86_64-linux/include NO_DEFAULT_PATH NO_CACHE)
    if(NOT folder)
      set(DDP_NCCL_PROBLEM "CUDA's header ${header} was not found: run scripts/bootstrap.sh without --minimal, or set CUDA_HOME to a CUDA toolkit" PARENT_SCOPE)
      return()
    endif()
    list(APPEND folders "${folder}")
    unset(folder)
  endforeach()
  set(nccl_places ${wheels} ${NCCL_ROOT} $ENV{NCCL_ROOT} $ENV{NCCL_HOME} ${places})
  find_path(nccl_folder nccl.h PATHS ${nccl_places} /usr PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  find_library(nccl_library NAMES libnccl.so.2 PATHS ${nccl_places} /usr PATH_SUFFIXES lib lib64 lib/x86_64-linux-gnu NO_DEFAULT_PATH NO_CACHE)
  if(NOT nccl_folder)
    set(DDP_NCCL_PROBLEM "NCCL's header nccl.h was not found: run scripts/bootstrap.sh without --minimal, or set NCCL_ROOT to an NCCL of the version that LibTorch uses" PARENT_SCOPE)
    return()
  endif()
  if(NOT nccl_library)
    set(DDP_NCCL_PROBLEM "NCCL's library libnccl.so.2 was not found: run scripts/bootstrap.sh without --minimal, or set NCCL_ROOT" PARENT_SCOPE)
    return()
  endif()
  string(REGEX REPLACE "/$" "" nccl_folder "${nccl_folder}")
  _ddp_nccl_header_version("${nccl_folder}/nccl.h" of_header)
  _ddp_nccl_library_version("${nccl_library}" of_library)
  if(NOT of_header STREQUAL of_library)
    message(FATAL_ERROR
      "NCCL's header and library are of different versions:\n"
      "  ${of_header}: ${nccl_folder}/nccl.h\n"
      "  ${of_library}: ${nccl_library}\n"
      "Name a matching pair with -DNCCL_ROOT=/path/to/nccl, or build without NCCL: -DDDP_WITH_NCCL=OFF")
  endif()
  list(APPEND folders "${nccl_folder}")
  list(REMOVE_DUPLICATES folders)
  set(DDP_NCCL_INCLUDE_DIRS "${folders}" PARENT_SCOPE)
  set(DDP_NCCL_VERSION "${of_header}" PARENT_SCOPE)
endfunction()
