#!/usr/bin/env bash
# Jobs of several nodes over a network that the test makes and removes: each node is a network
# namespace of its own, joined by veth pairs to a bridge in one more.
#
#   nodes_test.sh NAME LAUNCH WORKER
#
# Everything lies below one process (unshare) with namespaces of its own for the network, mounts and
# processes: when that ends, the kernel ends and removes it all, whatever happened.
set -euo pipefail

name=$1
launch=$2
worker=$3

if [ -z "${DDP_NETWORK_TEST:-}" ]; then
  probe='mount -t tmpfs none /run && ip link add name left type veth peer name right && ip link add name switch type bridge && ip netns add x'
  if ! unshare --net --mount --pid --fork sh -c "$probe" 2>/dev/null; then
    echo "skipped: needs the right to make network namespaces (root), and iproute2"
    exit 77
  fi
  DDP_NETWORK_TEST=1 exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

die() { printf '%s: %s\n' "$name" "$*" >&2; tail -n 40 "$folder"/node* >&2 || true; exit 1; }

mount -t tmpfs none /run  # ip keeps its namespaces here
mkdir -p /run/netns
folder=$(mktemp -d "${TMPDIR:-/tmp}/launch-network-XXXXXX")
trap 'rm -rf "$folder"' EXIT
# A batch system's variables are the test's own.
unset "${!SLURM_@}" "${!OMPI_@}" "${!PET_@}" 2>/dev/null || true
export DIR=$folder WORKER=$worker

await() {  # until the command succeeds
  local what=$1 end=$((SECONDS + 60))
  shift
  until "$@" 2>/dev/null; do
    [ $SECONDS -lt $end ] || die "waited in vain until $what"
    sleep 0.01
  done
}

make_nodes() {
  local i
  ip link add name switch type bridge
  ip link set switch up
  for ((i = 0; i < $1; i++)); do
    ip netns add "node$i"
    ip link add name "port$i" type veth peer name eth0 netns "node$i"
    ip link set "port$i" master switch up
    ip -n "node$i" link set lo up
    ip -n "node$i" addr add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "node$i" addr add "fd77::$((i + 1))/64" dev eth0 nodad
    ip -n "node$i" link set eth0 up
  done
}

declare -A pids
start() {  # NODE options... -- program...
  local node=$1
  shift
  ip netns exec "node$node" "$launch" "$@" > "$folder/node$node" 2>&1 &
  pids[$node]=$!
}
finish() {  # NODE STATUS
  local status=0
  wait "${pids[$1]}" || status=$?
  [ "$status" = "$2" ] || die "node $1 ended with $status, not $2"
}
# As text, so that a test can see that it is neither more nor less.
expect_lines() {  # FILE LINES...
  local file=$1
  shift
  [ "$(sort "$file")" = "$(printf '%s\n' "$@" | sort)" ] || die "unexpected: $(cat "$file")"
}
no_worker() { ! pgrep -f "$folder/mark" > /dev/null; }

static() { echo --nnodes="$1" --node_rank="$2" --master_addr=10.77.0.1 --use_env; }
meet='echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $GROUP_WORLD_SIZE; exec $WORKER meet any'
hold='echo > $DIR/ready.$RANK; exec sh -c "sleep 300; :" $DIR/mark'

case $name in
  two_nodes)
    make_nodes 2
    for node in 1 0; do start $node $(static 2 $node) --nproc_per_node=2 sh -c "$meet"; done
    finish 0 0
    finish 1 0
    expect_lines "$folder/node0" "0 0 0 4 2" "1 1 0 4 2"
    expect_lines "$folder/node1" "2 0 1 4 2" "3 1 1 4 2"
    ;;
  three_nodes)
    make_nodes 3
    for node in 2 0 1; do
      start $node --nnodes=3:3 --node_rank=$node --rdzv_backend=static --rdzv_id=job \
        --rdzv_endpoint=10.77.0.1:4321 --use_env --nproc_per_node=1 sh -c \
        'echo $RANK $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID; exec $WORKER meet any'
    done
    for node in 0 1 2; do
      finish $node 0
      expect_lines "$folder/node$node" "$node 10.77.0.1:4321 job"
    done
    ;;
  ipv6)
    # What the worker's own meeting cannot do is tried with the address alone.
    make_nodes 2
    for node in 0 1; do
      start $node --nnodes=2 --node_rank=$node --rdzv_endpoint='[fd77::1]:4321' --use_env \
        sh -c 'echo $RANK $MASTER_ADDR $MASTER_PORT'
    done
    for node in 0 1; do
      finish $node 0
      expect_lines "$folder/node$node" "$node fd77::1 4321"
    done
    ;;
  by_name)
    make_nodes 2
    # A name that appears only once the launchers have begun to ask for it.
    cp /etc/hosts "$folder/hosts"
    mount --bind "$folder/hosts" /etc/hosts
    for node in 0 1; do
      start $node --nnodes=2 --node_rank=$node --master_addr=node-zero-of-the-test --use_env \
        sh -c 'echo $RANK > $DIR/named.$RANK'
    done
    await "both wait for the name" grep -q "asking again" "$folder/node0"
    await "both wait for the name" grep -q "asking again" "$folder/node1"
    echo "10.77.0.1 node-zero-of-the-test" >> "$folder/hosts"
    finish 0 0
    finish 1 0
    [ -e "$folder/named.1" ] || die "rank 1 did not run"
    ;;
  slurm)
    make_nodes 2
    cp /etc/hosts "$folder/hosts"
    echo "10.77.0.1 n07" >> "$folder/hosts"
    mount --bind "$folder/hosts" /etc/hosts
    export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='n[07-08]'
    export SLURM_JOB_ID=10 SLURM_STEP_ID=3
    for node in 1 0; do
      SLURM_NODEID=$node start $node --nproc_per_node=2 --use_env sh -c \
        'export MASTER_ADDR=10.77.0.1; echo $RANK $WORLD_SIZE $MASTER_PORT $TORCHELASTIC_RUN_ID
         exec $WORKER meet any'
    done
    finish 0 0
    finish 1 0
    expect_lines "$folder/node0" "0 4 15013 slurm-10.3" "1 4 15013 slurm-10.3"
    expect_lines "$folder/node1" "2 4 15013 slurm-10.3" "3 4 15013 slurm-10.3"
    ;;
  worker_fails)
    # The workers of the other node fail because they lose their peer, as a library's would.
    make_nodes 2
    for node in 0 1; do
      start $node $(static 2 $node) sh -c "echo > \$DIR/ready.\$RANK
        until [ -e \$DIR/ready.0 ] && [ -e \$DIR/ready.1 ]; do sleep 0.01; done
        if [ \$RANK = 1 ]; then echo > \$DIR/failed; exit 7; fi
        until [ -e \$DIR/failed ]; do sleep 0.01; done; exit 8"
    done
    finish 1 7
    finish 0 8
    grep -q "rank 1 (local rank 0" "$folder/node1" || die "node 1 does not name its rank"
    ;;
  node_killed)
    make_nodes 2
    for node in 0 1; do start $node $(static 2 $node) --nproc_per_node=2 sh -c "$hold"; done
    for rank in 0 1 2 3; do await "rank $rank is there" test -e "$folder/ready.$rank"; done
    no_worker && die "the test does not see the workers"
    kill -KILL "${pids[1]}"
    finish 1 137
    kill -TERM "${pids[0]}"
    finish 0 143
    await "no worker is left" no_worker
    ;;
  restart)
    make_nodes 2
    for node in 0 1; do
      start $node $(static 2 $node) --max_restarts=1 --nproc_per_node=2 sh -c \
        '[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 5; exec $WORKER meet any'
    done
    finish 0 0
    finish 1 0
    ;;
  link_cut)
    # What the launcher itself does then is to end its own workers when it is told to.
    make_nodes 2
    for node in 0 1; do start $node $(static 2 $node) --timeout=2 sh -c "$hold"; done
    for rank in 0 1; do await "rank $rank is there" test -e "$folder/ready.$rank"; done
    ip link set port1 down
    finish 0 124
    finish 1 124
    await "no worker is left" no_worker
    ;;
  loopback_only)
    # One node: nothing of the job can be reached from another machine.
    make_nodes 1
    start 0 --nproc_per_node=2 --use_env sh -c \
      '[ $RANK = 1 ] && { until [ -e $DIR/seen ]; do sleep 0.01; done; }; exec $WORKER meet adopt'
    listening() { [ -n "$(ip netns exec node0 ss -Htln)" ]; }
    await "rank 0 listens" listening
    where=$(ip netns exec node0 ss -Htln)
    echo > "$folder/seen"
    finish 0 0
    [ -z "$(awk '$4 !~ /^127\.0\.0\.1:/' <<< "$where")" ] || die "listens on $where"
    ;;
  port_in_use)
    make_nodes 2
    start 0 $(static 1 0) --master_port=4321 sh -c \
      'MASTER_PORT=4321 MASTER_ADDR=10.77.0.1 WORLD_SIZE=2 exec $WORKER meet any'
    listening() { ip netns exec node0 ss -Htln | grep -q :4321; }
    await "the port is taken" listening
    status=0
    ip netns exec node0 "$launch" $(static 2 0) --master_port=4321 true > "$folder/node1" 2>&1 ||
      status=$?
    [ $status = 1 ] || die "status $status"
    grep -q "10.77.0.1:4321" "$folder/node1" || die "the port is not named"
    kill -TERM "${pids[0]}"
    finish 0 143
    ;;
  *) die "no such test" ;;
esac
echo "$name: passed"
