#!/usr/bin/env bash
# Jobs that really train. What listens on each node meanwhile, by `ss -ltnp`: on one node nothing that another machine
# can reach; with several the store's port, that of the rendezvous, and the backend's own, and nothing else. And what
# becomes of them without a network.
#
#   training_test.sh NAME LAUNCH WORKER PROGRAM      (PROGRAM: test/launched's)
. "$(dirname "$0")/nodes.sh"
export PROGRAM=$4 LAUNCHED_TIMEOUT=60

# Each rank says where its store is, and trains until the test ends it.
train='echo $MASTER_PORT > $DIR/port.$RANK; exec $PROGRAM until_end'

trained() { await "all of $1 train" test -e "$folder/trained.$1"; }
listeners() { ip netns exec "node$1" ss -Hltnp > "$folder/listeners$1"; }
# Who listens on NODE otherwise than at an address that the extended regular expression matches.
expect_only() {  # NODE EXPRESSION
  listeners "$1"
  [ -s "$folder/listeners$1" ] || die "nothing listens on node $1: the test sees nothing"
  local others
  others=$(awk -v allowed="^($2)\$" '$4 !~ allowed' "$folder/listeners$1")
  [ -z "$others" ] || die "listens on node $1: $others"
}
expect_one() {  # NODE EXPRESSION OWNER
  local count
  count=$(awk -v wanted="^($2)\$" '$4 ~ wanted' "$folder/listeners$1" | grep -c "\"$3\"") || true
  [ "$count" = 1 ] || die "$count sockets of $3 at $2: $(cat "$folder/listeners$1")"
}
said() { grep -q -- "$2" "$folder/node$1" || die "node $1 does not say: $2"; }
nothing_left() {
  local node
  for node in "$@"; do await "nothing is left on node $node" eval "[ -z \"\$(ip netns pids node$node)\" ]"; done
}
static() {  # NODE
  start "$1" --nnodes=2 --node_rank="$1" --master_addr=10.77.0.1 --master_port=4321 --use_env sh -c "$train"
}
end() {
  touch "$folder/end"
  local node
  for node in "$@"; do finish "$node" 0; done
}

case $name in
  listeners_one_node)
    # Nobody says which interface to use: the launcher keeps the job on loopback.
    make_nodes 1
    unset GLOO_SOCKET_IFNAME
    start 0 --nproc_per_node=2 --use_env sh -c "$train"
    trained 2
    expect_only 0 '127\.0\.0\.1:[0-9]+|\[::1\]:[0-9]+'
    expect_one 0 "127\\.0\\.0\\.1:$(cat "$folder/port.0")" launched
    end 0
    ;;
  listeners_two_nodes)
    make_nodes 2
    export GLOO_SOCKET_IFNAME=eth0
    for node in 0 1; do static $node; done
    trained 2
    expect_only 0 '[^ ]*:4321|10\.77\.0\.1:[0-9]+'
    expect_one 0 '[^ ]*:4321' launched
    expect_only 1 '10\.77\.0\.2:[0-9]+'
    end 0 1
    ;;
  listeners_c10d)
    make_nodes 2
    export GLOO_SOCKET_IFNAME=eth0
    for node in 0 1; do
      start $node --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=10.77.0.1 --use_env sh -c "$train"
    done
    trained 2
    port=$(cat "$folder/port.0")
    expect_only 0 "[^ ]*:29400|[^ ]*:$port|10\\.77\\.0\\.1:[0-9]+"
    expect_one 0 '[^ ]*:29400' ddp-rendezvous
    expect_one 0 "[^ ]*:$port" launched
    expect_only 1 '10\.77\.0\.2:[0-9]+'
    end 0 1
    ;;
  training_link_cut)
    # Each side gives up after the timeout, says whom it lost, and leaves nothing.
    make_nodes 2
    export GLOO_SOCKET_IFNAME=eth0 LAUNCHED_TIMEOUT=10
    for node in 0 1; do static $node; done
    trained 2
    ip link set port1 down
    for node in 0 1; do
      finish $node 1
      said $node "root cause:"
      said $node "ddp::CommunicationError: rank $node of 2: .* failed"
    done
    nothing_left 0 1
    ;;
  training_interface_down)
    # From the start: node 1 cannot reach node 0, and node 0 waits in vain.
    make_nodes 2
    export GLOO_SOCKET_IFNAME=eth0 LAUNCHED_TIMEOUT=3
    ip -n node1 link set eth0 down
    for node in 0 1; do static $node; done
    for node in 0 1; do finish $node 1; done
    said 0 "rank 1 of 2 did not come to the store at 10.77.0.1"
    said 1 "this machine has no route to the master 10.77.0.1"
    nothing_left 0 1
    ;;
  *) die "no such test" ;;
esac
echo "$name: passed"
