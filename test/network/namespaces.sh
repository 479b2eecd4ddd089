# Nodes on one machine: each is a network namespace of its own, joined by veth pairs to a bridge in one more.
# To be sourced by a script that calls
#
#   enter_namespaces "$@"    its own arguments; ends with 77 where there is no right to make namespaces
#   make_nodes COUNT         node0, node1, ... with 10.77.0.1, fd77::1, ... on their eth0
#
# Everything lies below one process (unshare) with namespaces of its own for the network, mounts and
# processes: when that ends, the kernel ends and removes it all, whatever happened.

enter_namespaces() {
  if [ -z "${DDP_IN_NAMESPACES:-}" ]; then
    local probe='mount -t tmpfs none /run && ip link add name left type veth peer name right && ip link add name switch type bridge && ip netns add x'
    if ! unshare --net --mount --pid --fork sh -c "$probe" 2>/dev/null; then
      echo "skipped: needs the right to make network namespaces (root), and iproute2"
      exit 77
    fi
    DDP_IN_NAMESPACES=1 exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
  fi
  mount -t tmpfs none /run  # ip keeps its namespaces here
  mkdir -p /run/netns
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
