#!/usr/bin/env bash
# The MNIST sample, whole: mnist_test.sh BIN DATA CASE
set -u
bin=$1
data=$2
name=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1

fail() {
  echo "FAILED: $*"
  tail -n 40 "$work"/* 2>/dev/null
  exit 1
}
train() {  # train PROCESSES OUTPUT ARGUMENTS...
  local processes=$1 output=$2
  shift 2
  if [ "$processes" = 1 ]; then
    "$bin/mnist" --data "$data" "$@" >"$output" 2>"$output.err" || fail "mnist $*"
  else
    "$bin/launch" --nproc_per_node="$processes" "$bin/mnist" --data "$data" "$@" >"$output" 2>"$output.err" ||
      fail "launch $processes mnist $*"
  fi
}
losses() { sed -n 's/^epoch .*: loss \([0-9.e+-]*\),.*/\1/p' "$1"; }
checksums() { sed -n 's/^epoch .*parameters \([0-9a-f]*\).*/\1/p' "$1"; }

case $name in
  accuracy)
    train 2 "$work/out"
    tail -n 1 "$work/out" | awk '$1 == "test" && $2 == "accuracy:" && $3 >= 0.95 { good = 1 } END { exit !good }' ||
      fail "the accuracy is below 0.95"
    ;;
  follows_one_process | follows_one_process_in_float)
    # The same permutation: the two halves of a global batch are the two ranks' batches. After every
    # step the ranks compare their parameters, bit for bit. In double precision nothing but the last
    # digits may differ. In float, training magnifies rounding: at the default learning rate one process
    # with two threads strays as far from one with one thread, so a smaller one is taken there.
    if [ "$name" = follows_one_process ]; then
      same=(--double) bound=1e-7
    else
      same=(--lr 0.005) bound=1e-3
    fi
    train 1 "$work/one" --no_batch_norm --batch_size 64 --epochs 3 "${same[@]}"
    train 2 "$work/two" --no_batch_norm --batch_size 32 --epochs 3 --check_every_step "${same[@]}"
    paste <(losses "$work/one") <(losses "$work/two") | tee "$work/losses" |
      awk -v bound=$bound '{ d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > bound) bad = 1; count++ }
                           END { exit bad || count != 3 }' ||
      fail "the losses differ"
    ;;
  repeatable)
    train 2 "$work/first" --epochs 1
    train 2 "$work/second" --epochs 1
    [ -n "$(checksums "$work/first")" ] || fail "no checksum"
    [ "$(checksums "$work/first")" = "$(checksums "$work/second")" ] || fail "two runs differ"
    ;;
  *) fail "unknown case $name" ;;
esac
