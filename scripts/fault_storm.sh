#!/bin/sh
# Random faults (exit, SIGKILL, SIGSTOP, exceptions) on one rank of a training job, one after
# another; each must end on every rank as test/process/test_faults.cpp says.
#
# Usage: scripts/fault_storm.sh [ROUNDS] [SEED] [PRESET]      (defaults: 100, the time, dev)
set -eu
cd "$(dirname "$0")/.."
program=build/${3:-dev}/bin/test_faults
if [ ! -x "$program" ]; then
  echo "fault_storm: build the tests first: scripts/test.sh, or cmake --preset ${3:-dev} && cmake --build --preset ${3:-dev}" >&2
  exit 2
fi
export DDP_FAULT_ROUNDS="${1:-100}" DDP_FAULT_SEED="${2:-$(date +%s)}"
exec "$program" 'faults: at random'
