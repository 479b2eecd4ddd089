#!/usr/bin/env bash
# Programs that use the library, under the launcher. Usage: launched_test.sh BIN CASE
set -u
bin=$1
name=$2
launch=$bin/launch
program=$bin/launched
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "FAILED: $*"
  tail -n 50 "$work"/* 2>/dev/null
  exit 1
}
# expect STATUS COUNT TEXT FILE: the text stands COUNT times in the file, and the status was STATUS.
expect() {
  [ "$1" = "$status" ] || fail "status $status, expected $1"
  [ "$(grep -c -- "$3" "$4")" = "$2" ] || fail "expected $2 times: $3"
}

case $name in
  local_rank)  # as torch.distributed.launch's programs: the first argument
    "$launch" --nproc_per_node=2 "$program" step >"$work/out" 2>&1; status=$?
    expect 0 2 "right: rank" "$work/out" ;;
  environment)  # a program that reads only the environment
    "$launch" --use_env --nproc_per_node=3 "$program" environment >"$work/out" 2>&1; status=$?
    expect 0 3 "right: rank" "$work/out" ;;
  two_nodes)  # static, both nodes on this machine
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    for node in 0 1; do
      "$launch" --nnodes=2 --node_rank=$node --master_addr=127.0.0.1 --master_port="$port" --nproc_per_node=2 \
        "$program" step >"$work/out$node" 2>&1 &
      jobs[$node]=$!
    done
    for node in 0 1; do
      wait "${jobs[$node]}"; status=$?
      expect 0 2 "right: rank [0-3] of 4" "$work/out$node"
    done ;;
  side_by_side)  # C24: jobs on one machine never meet
    for job in 1 2 3; do
      "$launch" --nproc_per_node=2 "$program" step >"$work/out$job" 2>&1 &
      jobs[$job]=$!
    done
    for job in 1 2 3; do
      wait "${jobs[$job]}"; status=$?
      expect 0 2 "right: rank [01] of 2" "$work/out$job"
    done ;;
  store)  # C27: rank 0 leaves first
    "$launch" --nproc_per_node=2 "$program" store >"$work/out" 2>&1; status=$?
    expect 0 1 "rank 1 read word" "$work/out" ;;
  host_name)  # C28: a machine whose own name has no address
    [ "$(id -u)" = 0 ] && unshare -u true 2>/dev/null || exit 77
    for way in "" "--master_addr=127.0.0.1 --master_port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"; do
      unshare -u sh -c 'hostname bogus-host-xyz; exec "$@"' sh "$launch" --nproc_per_node=2 $way "$program" step >"$work/out" 2>&1; status=$?
      expect 0 2 "right: rank" "$work/out"
    done
    LAUNCHED_TIMEOUT=5 unshare -u sh -c 'hostname bogus-host-xyz; exec "$@"' sh \
      "$launch" --nproc_per_node=2 --master_addr=bogus-host-xyz --master_port=29511 "$program" step >"$work/out" 2>&1; status=$?
    [ "$status" != 0 ] || fail "a host without an address was accepted"
    grep -q "bogus-host-xyz" "$work/out" || fail "the host is not named" ;;
  throws)  # what an exception said stands in the report, and in a file as @record writes it
    "$launch" --use_env --nproc_per_node=2 --log_dir="$work/logs" --rdzv_id=id --redirects=2 "$program" throws >"$work/out" 2>&1; status=$?
    expect 1 1 "^launch:       ddp::UsageError: rank 1 wants no more$" "$work/out"
    expect 1 1 "root cause:" "$work/out"
    python3 - "$work/logs/id/attempt_0/1/error.json" <<'END' || fail "the error file is not as @record's"
import json, sys, time
message = json.load(open(sys.argv[1]))["message"]
assert message["message"] == "ddp::UsageError: rank 1 wants no more", message
assert time.time() - 600 < int(message["extraInfo"]["timestamp"]) <= time.time(), message
END
    ;;
  *) fail "unknown case $name" ;;
esac
