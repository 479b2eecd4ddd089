#!/usr/bin/env bash
# link.sh RATE COMMAND...: runs COMMAND where "ip netns exec node0" and "node1" reach two nodes, 10.77.0.1 and .2 on
# their eth0, with a link of RATE each way between them. Ends with 77 where there is no right to make them. All of it
# lies below one process (unshare): when that ends, it is gone.
set -euo pipefail

if [ -z "${DDP_BENCH_LINK:-}" ]; then
  probe='mount -t tmpfs none /run && mkdir /run/netns && ip netns add x && ip -n x link set lo up && tc -n x qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms'
  if ! unshare --net --mount --pid --fork sh -c "$probe" 2>/dev/null; then
    echo "skipped: needs the right to make network namespaces (root), and iproute2"
    exit 77
  fi
  DDP_BENCH_LINK=1 exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

rate=$1
shift
mount -t tmpfs none /run  # ip keeps its namespaces here
mkdir /run/netns
ip netns add node0
ip netns add node1
ip link add name left netns node0 type veth peer name right netns node1
ip -n node0 link set left name eth0
ip -n node1 link set right name eth0
for i in 0 1; do
  ip -n "node$i" link set lo up
  ip -n "node$i" addr add "10.77.0.$((i + 1))/24" dev eth0
  ip -n "node$i" link set eth0 up
  tc -n "node$i" qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 50ms
done
"$@"
