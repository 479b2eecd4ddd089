#!/usr/bin/env bash
# Everything about ddp that needs a GPU, in one run of at most 8 minutes; see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<EOF
usage: scripts/gpu_check.sh [--output FOLDER]
       scripts/gpu_check.sh --pack [FOLDER]

Builds the NCCL plug-in and what it is tested with, and runs on this machine's GPU:
every test labelled gpu; the MNIST sample over NCCL; and training steps of the bare module, of ddp and of
Python's DistributedDataParallel over NCCL, with their losses, times, communication and memory.
Writes gpu_check.json and gpu_check.txt to FOLDER (default: the current one).

Needs a GPU with its driver, a C++20 compiler, CMake, Ninja, python3 with torch (DDP_PYTHON names it), and
the headers of CUDA and NCCL (torch's wheels have them, or a CUDA toolkit). No network.

  --pack    Collects into FOLDER (default: gpu_pack) what Debian packages bring otherwise: the headers of
            cxxopts, Catch2 and fmt, and the digits. Run it where these are installed, and carry the folder along.

Ends with 0 where all is well, 1 where something failed, 3 where there is no GPU.
EOF
}

say() { printf 'gpu_check: %s\n' "$*"; }
die() { printf 'gpu_check: %s\n' "$*" >&2; exit 1; }

pack_package() {  # pack_package FOLDER NAME VERSION TARGET
  mkdir -p "$1/lib/cmake/$2"
  cat > "$1/lib/cmake/$2/$2Config.cmake" <<EOF
if(NOT TARGET $4)
  add_library($4 INTERFACE IMPORTED)
  target_include_directories($4 SYSTEM INTERFACE "\${CMAKE_CURRENT_LIST_DIR}/../../../include")
endif()
EOF
  printf 'set(PACKAGE_VERSION %s)\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n' "$3" > "$1/lib/cmake/$2/$2ConfigVersion.cmake"
}

pack() {
  local folder=$1 from=${DDP_PACK_FROM:-/usr/include}
  rm -rf "${folder:?}/include" "$folder/lib"
  mkdir -p "$folder/include"
  for name in cxxopts.hpp catch2 fmt; do
    [ -e "$from/$name" ] || die "--pack: $from/$name is missing; install catch2, libfmt-dev and libcxxopts-dev, or set DDP_PACK_FROM"
    cp -rL "$from/$name" "$folder/include/"
  done
  mkdir -p "$folder/lib/cmake/Catch2"
  # The module that lists a program's test cases for CTest.
  local modules
  modules=$(find "$from/../lib" "$from/../share" -name Catch.cmake -path '*Catch2*' 2>/dev/null | head -n 1)
  [ -n "$modules" ] || die "--pack: Catch2's Catch.cmake is missing; install catch2"
  cp "$modules" "$(dirname "$modules")/CatchAddTests.cmake" "$folder/lib/cmake/Catch2/"
  pack_package "$folder" Catch2 2.13.10 Catch2::Catch2
  echo 'list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")' >> "$folder/lib/cmake/Catch2/Catch2Config.cmake"
  pack_package "$folder" cxxopts 3.1.1 cxxopts::cxxopts
  pack_package "$folder" fmt 9.1.0 fmt::fmt-header-only
  echo 'target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY=1)' >> "$folder/lib/cmake/fmt/fmtConfig.cmake"
  if [ -d data/mnist ]; then
    mkdir -p "$folder/data"
    cp -r data/mnist "$folder/data/"
  fi
  say "packed into $folder: $(du -sh "$folder" | cut -f 1)"
}

output=.
while [ $# -gt 0 ]; do
  case "$1" in
    --pack) pack "${2:-gpu_pack}"; exit 0 ;;
    --output) [ $# -gt 1 ] || die "--output needs a folder"; output=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument: $1" ;;
  esac
done

python=${DDP_PYTHON:-}
for candidate in .deps/venv/bin/python python3; do
  [ -n "$python" ] || ! "$candidate" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null || python=$candidate
done
[ -n "$python" ] || die "no python3 here has torch; name one with DDP_PYTHON"

# As the driver counts them, without LibTorch.
gpus=$("$python" - <<'EOF'
import ctypes
count = ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
except OSError:
    pass
print(count.value)
EOF
)
if [ "$gpus" = 0 ]; then
  say "no GPU: no NVIDIA driver, or no device is visible to it (nvidia-smi, CUDA_VISIBLE_DEVICES). Nothing was run."
  exit 3
fi

torch=$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("torch").origin))')
say "$gpus GPU(s); LibTorch in $torch"
start=$SECONDS
mkdir -p "$output"
if [ -d gpu_pack/data/mnist ] && [ ! -d data/mnist ]; then
  mkdir -p data && cp -r gpu_pack/data/mnist data/
fi
build=build/gpu
cmake -G Ninja -S . -B $build -DCMAKE_BUILD_TYPE=Release -DDDP_WITH_NCCL=ON -DTorch_ROOT="$torch" \
  -DCMAKE_PREFIX_PATH="$PWD/gpu_pack" > "$output/gpu_check_build.log" 2>&1 || { tail -n 20 "$output/gpu_check_build.log"; die "the configuration failed"; }
targets=(ddp_nccl test_gpu gpu_step)
[ ! -d data/mnist ] || targets+=(launch mnist)
timeout 330 cmake --build $build --target "${targets[@]}" >> "$output/gpu_check_build.log" 2>&1 ||
  { tail -n 40 "$output/gpu_check_build.log"; die "the build failed, or took more than 330 s"; }
say "built in $((SECONDS - start)) s"
left=$((480 - (SECONDS - start)))
exec timeout --kill-after=5 "$left" "$python" test/gpu/gpu_check.py "$build/bin" "$output" \
  --minutes "$(awk -v left="$left" 'BEGIN { print (left - 20) / 60 }')"
