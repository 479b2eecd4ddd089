#!/usr/bin/env bash
# Compares the launcher with a plain fork and exec of as many programs and, where there is one, with torchrun.
#
#   scripts/bench_launcher.sh [--rounds N] [--workers N,N,...] [--json FILE]
#
# BUILD: the build folder (default: build/release, else build/dev); TORCHRUN: the program (default: that of the
# LibTorch which scripts/bootstrap.sh brings).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
for build in "${BUILD:-}" "$root/build/release" "$root/build/dev"; do
  [ -n "$build" ] && [ -x "$build/bin/bench_launch" ] && break
done
[ -x "$build/bin/bench_launch" ] || { echo "build the target bench_launch first" >&2; exit 2; }
torchrun=${TORCHRUN:-$root/.deps/venv/bin/torchrun}
[ -x "$torchrun" ] || { echo "no torchrun at $torchrun: without it" >&2; torchrun=; }
exec "$build/bin/bench_launch" ${torchrun:+--torchrun "$torchrun"} "$@"
