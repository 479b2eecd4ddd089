#!/usr/bin/env bash
# check_script.sh SOURCE: the parts of scripts/gpu_check.sh that need no GPU.
set -u
cd "$1" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; cat "$work"/out 2>/dev/null; exit 1; }

bash -n scripts/gpu_check.sh && bash -n samples/slurm.sh || fail "syntax"
python3 -m py_compile test/gpu/gpu_check.py test/gpu/gpu_step.py || fail "syntax of the Python parts"
scripts/gpu_check.sh --help > "$work/out" || fail "--help"
grep -q -- --pack "$work/out" || fail "--help does not name --pack"
scripts/gpu_check.sh --nonsense > "$work/out" 2>&1 && fail "an unknown argument is taken"
# A folder of its own for nvidia-smi's and the driver's absence: no GPU is visible then.
CUDA_VISIBLE_DEVICES= scripts/gpu_check.sh --output "$work" > "$work/out" 2>&1
[ $? = 3 ] || fail "without a GPU it must end with status 3"
grep -q "no GPU" "$work/out" || fail "it does not say that there is no GPU"
scripts/gpu_check.sh --pack "$work/pack" > "$work/out" 2>&1 || fail "--pack"
for file in include/cxxopts.hpp include/fmt/format.h lib/cmake/Catch2/Catch2Config.cmake lib/cmake/Catch2/Catch.cmake lib/cmake/cxxopts/cxxoptsConfigVersion.cmake; do
  [ -e "$work/pack/$file" ] || fail "--pack left out $file"
done
python3 test/gpu/gpu_check.py --table test/gpu/example.json > "$work/out" || fail "the table"
grep -q "step time" "$work/out" || fail "the table has no step time"
echo "as it should be"
