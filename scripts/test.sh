#!/usr/bin/env bash
# Sets up, builds and runs every test. Arguments go to CTest: scripts/test.sh -L unit
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh
cmake --preset dev
cmake --build --preset dev
exec ctest --preset dev --parallel "$(nproc)" "$@"
