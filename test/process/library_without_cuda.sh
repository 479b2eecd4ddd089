#!/usr/bin/env bash
# library_without_cuda.sh LIBRARY [PLUGIN]: the library needs nothing of CUDA, the plug-in LibTorch's half.
set -u
needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }

if needed "$1" | grep -iE 'cuda|nccl|cudnn|cublas'; then
  echo "FAILED: $1 is linked with CUDA"
  exit 1
fi
case "$1" in
  *.so*) needed "$1" | grep -q '^libtorch_cpu.so$' || { echo "FAILED: $1 is not linked with LibTorch"; exit 1; } ;;
esac
if [ -n "${2:-}" ] && ! needed "$2" | grep -q '^libtorch_cuda.so$'; then
  echo "FAILED: $2 does not bring LibTorch's CUDA half"
  exit 1
fi
echo "as it should be"
