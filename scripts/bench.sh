#!/usr/bin/env bash
# Builds the benchmark (preset release) and runs it: training steps of ddp and of its peers, in turn in one run.
#   scripts/bench.sh [--quick] [--json FILE] ...    arguments are test/bench/bench.py's
# Prints tables and the ratios; writes the measures to build/bench.json unless --json names another file.
set -euo pipefail
cd "$(dirname "$0")/.."

for argument in "$@"; do
  case "$argument" in
    -h | --help) exec python3 test/bench/bench.py --help ;;
  esac
done

scripts/bootstrap.sh
cmake --preset release > /dev/null
cmake --build --preset release --target bench_step bench_growth bench_all_reduce launch
exec .deps/venv/bin/python test/bench/bench.py --json build/bench.json "$@"
