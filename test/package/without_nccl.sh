#!/usr/bin/env bash
# without_nccl.sh SOURCE BUILD WORK FAKE_DRIVER: a build without NCCL is a part of this one. It is configured, and
# each command that would build it must be one that has built BUILD. Then a program of this build, with the library
# alone beside it, hears from the launcher tests' driver of a GPU, and says what is missing.
set -euo pipefail
source=$1 build=$2 driver=$4
work=$(mktemp -d "$3/without_nccl_XXXXXX")
trap 'rm -rf "$work"' EXIT
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

cache() { sed -n "s/^$1:[^=]*=//p" "$build/CMakeCache.txt"; }
options=()
for name in CMAKE_BUILD_TYPE CMAKE_CXX_COMPILER CMAKE_CXX_FLAGS CMAKE_CXX_FLAGS_RELEASE CMAKE_CXX_FLAGS_RELWITHDEBINFO \
  CMAKE_PREFIX_PATH CMAKE_EXE_LINKER_FLAGS Torch_ROOT DDP_WARNINGS_AS_ERRORS DDP_SANITIZE DDP_CCACHE BUILD_SHARED_LIBS; do
  value=$(cache "$name")
  [ -z "$value" ] || options+=("-D$name=$value")
done
cmake -G Ninja -S "$source" -B "$work/off" "${options[@]}" -DDDP_WITH_NCCL=OFF -DDDP_BUILD_TESTS=OFF > "$work/log" 2>&1 ||
  { cat "$work/log"; fail "the configuration without NCCL"; }

commands() {  # commands FOLDER: what builds it, with the folder's name left out
  ninja -C "$1" -t commands | sed "s|$1|BUILD|g" | grep -v ' -E \(touch\|make_directory\|copy\)' | sort -u
}
commands "$build" > "$work/on.txt"
commands "$work/off" > "$work/off.txt"
count=$(wc -l < "$work/off.txt")
[ "$count" -gt 100 ] || fail "only $count commands build it"
comm -13 "$work/on.txt" "$work/off.txt" > "$work/new.txt"
[ ! -s "$work/new.txt" ] || { head -n 5 "$work/new.txt"; fail "$(wc -l < "$work/new.txt") of $count commands have not been run with NCCL"; }
! grep -q libddp_nccl "$work/off.txt" || fail "the plug-in is built"

mkdir "$work/lib" "$work/bin"
cp -a "$build"/lib/libddp.so* "$work/lib/"
cp "$build/bin/mnist" "$work/bin/"
if FAKE_GPUS=one RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 \
  LD_LIBRARY_PATH="$work/lib:$driver" "$work/bin/mnist" --data "$source/data/mnist" --backend nccl > "$work/said" 2>&1; then
  fail "it trained over NCCL"
fi
grep -q 'this ddp was built without NCCL: libddp_nccl.so is not in' "$work/said" || { cat "$work/said"; fail "what it said"; }
printf 'all of the %s commands have built this one, too\n' "$count"
