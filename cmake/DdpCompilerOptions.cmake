# ddp_warnings: the project's warnings; every target of the project links it privately, so that
# a consumer's own flags stay its own.
add_library(ddp_warnings INTERFACE)
target_compile_options(ddp_warnings INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
                                              -Woverloaded-virtual)
if(DDP_WARNINGS_AS_ERRORS)
  target_compile_options(ddp_warnings INTERFACE -Werror)
endif()

if(DDP_SANITIZE)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

if(DDP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(DDP_CCACHE_PROGRAM ccache)
  mark_as_advanced(DDP_CCACHE_PROGRAM)
  if(DDP_CCACHE_PROGRAM)
    # Precompiled headers need these, or every unit misses the cache.
    set(CMAKE_CXX_COMPILER_LAUNCHER
        "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
        "${DDP_CCACHE_PROGRAM}")
  endif()
endif()
