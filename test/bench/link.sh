#!/usr/bin/env bash
# link.sh RATE COMMAND...: runs COMMAND where "ip netns exec node0" and "node1" reach two nodes, 10.77.0.1 and .2 on
# their eth0, with a link of RATE each way between them. Ends with 77 where there is no right to make them.
set -euo pipefail
source "$(dirname "$0")/../network/namespaces.sh"
enter_namespaces "$@"

rate=$1
shift
make_nodes 2
for i in 0 1; do
  tc -n "node$i" qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 50ms
done
"$@"
