# Nodes for the tests of jobs over several: each is a network namespace of its own, joined by veth pairs
# to a bridge in one more. To be sourced by a test that is called as
#
#   TEST NAME LAUNCH WORKER ...
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

# The variables of a SLURM step of two nodes, and a name for the first. To be called before nodes start anything.
make_slurm_step() {
  cp /etc/hosts "$folder/hosts"
  echo "10.77.0.1 n07" >> "$folder/hosts"
  mount --bind "$folder/hosts" /etc/hosts
  export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='n[07-08]'
  export SLURM_JOB_ID=10 SLURM_STEP_ID=3
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

# What workers do: meet all others, or stay until they are stopped.
meet='echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $GROUP_WORLD_SIZE; exec $WORKER meet any'
hold='echo > $DIR/ready.$RANK; exec sh -c "sleep 300; :" $DIR/mark'
