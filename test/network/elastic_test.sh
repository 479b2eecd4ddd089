#!/usr/bin/env bash
# Elastic jobs (c10d) of several nodes, which fail, die, come, leave and return.
#
#   elastic_test.sh NAME LAUNCH WORKER [PROGRAM]
#
# PROGRAM, for the test with real training, is test/launched's.
. "$(dirname "$0")/nodes.sh"
export PROGRAM=${4:-}

# Short times, so that the tests are; long enough for who is alive on a busy machine.
conf=last_call_timeout=0,keep_alive_interval=0.5,keep_alive_max_attempt=6,join_timeout=100
nnodes=2
endpoint=10.77.0.1
elastic() {  # NODE options... program...
  local node=$1
  shift
  start "$node" --nnodes=$nnodes --rdzv_backend=c10d --rdzv_endpoint="$endpoint" --rdzv_conf=$conf \
    --use_env "$@"
}
serving() { ip netns exec node0 ss -Htln | grep -q :29400; }
elastic_host() { elastic 0 "$@" && await "node 0 serves the rendezvous" serving; }
said() { grep -q -- "$2" "$folder/node$1"; }
gone() { [ -z "$(ip netns pids "node$1")" ]; }
nothing_left() {
  local node
  for node in "$@"; do await "nothing is left on node $node" gone "$node"; done
}
# All processes of the node at once: stopped first, so that none sees another one die and says so.
cut_power() {
  kill -STOP $(ip netns pids "node$1") 2>/dev/null || true
  kill -KILL $(ip netns pids "node$1") 2>/dev/null || true
  wait "${pids[$1]}" || true
}
at() { await "rank $2 of $1 is there" test -e "$folder/at.$1.$2"; }  # WORLD_SIZE RANK

# Says where it is and stays until the test has written `end`.
stay='echo > $DIR/at.$WORLD_SIZE.$RANK
  until [ -e $DIR/end ]; do sleep 0.02; done; : $DIR/mark'

case $name in
  c10d_two_nodes)
    make_nodes 2
    for node in 1 0; do elastic $node --nproc_per_node=2 sh -c "echo \$MASTER_ADDR; $meet"; done
    finish 0 0
    finish 1 0
    expect_lines "$folder/node0" 10.77.0.1 10.77.0.1 "0 0 0 4 2" "1 1 0 4 2"
    expect_lines "$folder/node1" 10.77.0.1 10.77.0.1 "2 0 1 4 2" "3 1 1 4 2"
    nothing_left 0 1
    ;;
  c10d_three_nodes)
    # As people write it, with an id and a port; rank 0 listens on the socket that it inherits.
    make_nodes 3
    nnodes=3 endpoint=10.77.0.1:4321
    for node in 2 0 1; do elastic $node --rdzv_id=job sh -c "${meet/any/adopt}"; done
    for node in 0 1 2; do
      finish $node 0
      expect_lines "$folder/node$node" "$node 0 $node 3 3"
    done
    nothing_left 0 1 2
    ;;
  c10d_ipv6)
    make_nodes 2
    endpoint='[fd77::1]:4321'
    for node in 1 0; do elastic $node sh -c 'echo $RANK $MASTER_ADDR'; done
    finish 0 0
    finish 1 0
    expect_lines "$folder/node0" "0 fd77::1"
    expect_lines "$folder/node1" "1 fd77::1"
    ;;
  c10d_by_name)
    # A machine often has its own name at an address that no other can reach.
    make_nodes 2
    for node in 0 1; do cp /etc/hosts "$folder/hosts$node"; done
    echo "127.0.1.1 node-zero-of-the-test" >> "$folder/hosts0"
    echo "10.77.0.1 node-zero-of-the-test" >> "$folder/hosts1"
    endpoint=node-zero-of-the-test
    real_launch=$launch
    for node in 1 0; do
      printf '#!/bin/sh\nmount --bind %s /etc/hosts && exec %s "$@"\n' "$folder/hosts$node" \
        "$real_launch" > "$folder/launch$node"
      chmod +x "$folder/launch$node"
      printf '#!/bin/sh\nexec unshare --mount %s "$@"\n' "$folder/launch$node" > "$folder/own$node"
      chmod +x "$folder/own$node"
      launch=$folder/own$node
      elastic $node sh -c 'echo $RANK $MASTER_ADDR'
    done
    finish 0 0
    finish 1 0
    expect_lines "$folder/node0" "0 node-zero-of-the-test"
    expect_lines "$folder/node1" "1 node-zero-of-the-test"
    ;;
  c10d_worker_killed)
    make_nodes 2
    try='echo $$ > $DIR/at.$WORLD_SIZE.$RANK.$TORCHELASTIC_RESTART_COUNT
      [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sh -c "sleep 300; :" $DIR/mark
      exec $WORKER meet any'
    for node in 0 1; do elastic $node --max_restarts=3 --nproc_per_node=2 sh -c "$try"; done
    for rank in 0 1 2 3; do await "rank $rank is there" test -s "$folder/at.4.$rank.0"; done
    kill -KILL "$(cat "$folder/at.4.3.0")"
    finish 0 0
    finish 1 0
    for node in 0 1; do
      said $node "on node 1 (10.77.0.2) was killed by SIGKILL (restart 1 of 3)" ||
        die "node $node does not name it"
    done
    [ -e "$folder/at.4.0.1" ] && [ ! -e "$folder/at.4.0.2" ] || die "another number of restarts"
    await "no worker is left" no_worker
    nothing_left 0 1
    ;;
  c10d_node_killed)
    make_nodes 3
    nnodes=1:3
    elastic_host sh -c "$stay"
    for node in 1 2; do elastic $node sh -c "$stay"; done
    at 3 2
    rm -f "$folder"/at.2.*
    cut_power 2
    at 2 0
    at 2 1
    for node in 0 1; do said $node "10.77.0.3 (pid .*) is dead" || die "node $node does not say why"; done
    touch "$folder/end"
    finish 0 0
    finish 1 0
    nothing_left 0 1 2
    ;;
  c10d_scale)
    # One node, two, three, two, three again: who comes, leaves, and returns.
    make_nodes 3
    nnodes=1:3
    elastic_host sh -c "$stay"
    at 1 0
    elastic 1 sh -c "$stay"
    at 2 0
    at 2 1
    elastic 2 sh -c "$stay"
    at 3 0
    at 3 1
    at 3 2
    rm "$folder"/at.*
    kill -TERM "${pids[1]}"
    finish 1 143
    at 2 0
    at 2 1
    nothing_left 1
    elastic 1 sh -c "$stay"
    at 3 0
    at 3 1
    at 3 2
    touch "$folder/end"
    for node in 0 1 2; do finish $node 0; done
    said 2 "10.77.0.2 (pid .*) has left the job (SIGTERM)" || die "node 2 does not say why"
    said 2 "10.77.0.2 (pid .*) has joined" || die "node 2 does not say why"
    nothing_left 0 1 2
    ;;
  c10d_link_cut)
    # The others go on without a node that cannot be reached; it ends by itself.
    make_nodes 3
    nnodes=2:3 conf=$conf,read_timeout=3
    elastic_host sh -c "$stay"
    for node in 1 2; do elastic $node sh -c "$stay"; done
    at 3 2
    rm -f "$folder"/at.2.*
    ip link set port2 down
    finish 2 1
    said 2 "did not answer within 3 s" || die "node 2 does not say why"
    at 2 0
    at 2 1
    said 0 "10.77.0.3 (pid .*) is dead" || die "node 0 does not say why"
    said 0 "10.77.0.2 (pid .*) is dead" && die "a living node was taken for dead"
    touch "$folder/end"
    finish 0 0
    finish 1 0
    nothing_left 0 1 2
    ;;
  c10d_host_killed)
    make_nodes 3
    nnodes=1:3
    elastic_host sh -c "$stay"
    for node in 1 2; do elastic $node sh -c "$stay"; done
    at 3 2
    cut_power 0
    for node in 1 2; do
      finish $node 1
      said $node "the rendezvous at 10.77.0.1:29400 is lost" || die "node $node does not say why"
    done
    await "no worker is left" no_worker
    nothing_left 0 1 2
    ;;
  c10d_host_cut)
    # Nothing tells the others, but that it does not answer.
    make_nodes 3
    nnodes=1:3 conf=$conf,read_timeout=3
    elastic_host sh -c "$stay"
    for node in 1 2; do elastic $node sh -c "$stay"; done
    at 3 2
    rm -f "$folder"/at.1.*
    ip link set port0 down
    for node in 1 2; do
      finish $node 1
      said $node "the rendezvous at 10.77.0.1:29400 is lost: it did not answer within 3 s" ||
        die "node $node does not say why"
    done
    nothing_left 1 2
    at 1 0
    touch "$folder/end"
    finish 0 0
    nothing_left 0
    ;;
  c10d_interface_down)
    make_nodes 2
    conf=$conf,join_timeout=3
    ip -n node1 link set eth0 down
    for node in 0 1; do elastic $node sh -c "$meet"; done
    for node in 0 1; do finish $node 1; done
    said 0 "1 of at least 2 nodes came within 3 s" || die "node 0 does not say why"
    said 1 "nobody serves the rendezvous at 10.77.0.1:29400 within 3 s" || die "node 1 does not say why"
    nothing_left 0 1
    ;;
  c10d_slurm)
    # The step says how many nodes there are, and which of them serves the rendezvous.
    make_nodes 2
    make_slurm_step
    for node in 1 0; do
      SLURM_NODEID=$node start $node --rdzv_backend=c10d --rdzv_conf=$conf --use_env sh -c \
        'echo $RANK $WORLD_SIZE $TORCHELASTIC_RUN_ID; MASTER_ADDR=10.77.0.1 exec $WORKER meet any'
    done
    for node in 0 1; do
      finish $node 0
      expect_lines "$folder/node$node" "$node 2 slurm-10.3"
    done
    ;;
  c10d_training)
    # Real training: a node dies under it, the rest trains on; then a node comes, and all do.
    make_nodes 3
    nnodes=1:3
    export GLOO_SOCKET_IFNAME=eth0 LAUNCHED_TIMEOUT=60
    train='echo > $DIR/at.$WORLD_SIZE.$RANK; exec $PROGRAM until_end'
    elastic_host --max_restarts=5 sh -c "$train"
    for node in 1 2; do elastic $node --max_restarts=5 sh -c "$train"; done
    trained() { await "world of $1 has trained" test -e "$folder/trained.$1"; }
    trained 3
    cut_power 1
    trained 2
    rm "$folder/trained.3"
    elastic 1 --max_restarts=5 sh -c "$train"
    trained 3
    touch "$folder/end"
    for node in 0 1 2; do finish $node 0; done
    for node in 0 1 2; do said $node "right: rank . of 3" || die "node $node did not train to the end"; done
    grep -h WRONG "$folder"/node* && die "wrong averages"
    nothing_left 0 1 2
    ;;
  *) die "no such test" ;;
esac
echo "$name: passed"
