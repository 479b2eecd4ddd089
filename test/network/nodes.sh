# For the tests of jobs over several nodes (namespaces.sh makes these). To be sourced by a test that is called as
#
#   TEST NAME LAUNCH WORKER ...
set -euo pipefail

name=$1
launch=$2
worker=$3

source "$(dirname "${BASH_SOURCE[0]}")/namespaces.sh"
enter_namespaces "$@"

die() { printf '%s: %s\n' "$name" "$*" >&2; tail -n 40 "$folder"/node* >&2 || true; exit 1; }

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
