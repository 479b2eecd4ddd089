#!/usr/bin/env bash
# Sets up, builds, and trains the MNIST sample on two processes of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh --minimal
cmake --preset release
cmake --build --preset release --target launch mnist
exec build/release/bin/launch --nproc_per_node=2 build/release/bin/mnist "$@"
