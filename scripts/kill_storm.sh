#!/usr/bin/env bash
# Starts jobs and kills, with SIGKILL and at a random moment, a worker, something that a worker has
# started, the launcher, its guardian, or two of them at once; then looks for anything that is left:
# processes, temporary files, and, where it may have a network namespace of its own (as root), sockets.
#
#   scripts/kill_storm.sh [ROUNDS [LAUNCH]]      (default: 200 rounds of build/dev/bin/launch)
#
# DDP_STORM_SEED repeats a storm's choices (not its timing).
set -euo pipefail

rounds=${1:-200}
launch=${2:-$(dirname "$0")/../build/dev/bin/launch}
patience=60  # seconds; longer than anything takes on a busy machine

die() { printf 'kill_storm: %s\n' "$*" >&2; exit 1; }
case $rounds in '' | *[!0-9]*) die "ROUNDS must be a number, not '$rounds'" ;; esac
[ -x "$launch" ] || die "no launcher at $launch: build it, or give its path as the second argument"

# In a network namespace of its own every socket is one of a job.
if [ -z "${DDP_STORM_NAMESPACE:-}" ] && unshare --net true 2>/dev/null; then
  DDP_STORM_NAMESPACE=1 exec unshare --net "$0" "$rounds" "$launch"
fi
sockets() { sed -n 's/^sockets: used //p' /proc/net/sockstat; }
if [ -n "${DDP_STORM_NAMESPACE:-}" ]; then
  ip link set lo up 2>/dev/null || true
  sockets_before=$(sockets)
fi

seed=${DDP_STORM_SEED:-$$}
RANDOM=$((seed % 32768))
folder=$(mktemp -d "${TMPDIR:-/tmp}/kill-storm-XXXXXX")
mark="DDP_KILL_STORM=$folder"

# The processes that carry the mark in their environment, but for this script's own.
left() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    if tr '\0' '\n' 2>/dev/null < "$environment" | grep -qxF "$mark"; then
      environment=${environment#/proc/}
      echo "${environment%/environ}"
    fi
  done 2>/dev/null
}

# Whether some process is in the middle of an exec, where neither its environment nor its arguments can be read. A
# kernel thread or a zombie has none either, but no program.
any_undecided() {
  local process word
  for process in /proc/[0-9]*; do
    word=
    IFS= read -r -d '' word < "$process/cmdline" || true
    [ -z "$word" ] && readlink "$process/exe" > /dev/null && return 0
  done 2>/dev/null
  return 1
}

cleanup() {
  local pid
  for pid in $(left); do kill -KILL "$pid" 2>/dev/null || true; done
  rm -rf "$folder"
}
trap cleanup EXIT

# Waits until the command succeeds.
await() {
  local what=$1 end=$((SECONDS + patience))
  shift
  until "$@"; do
    if [ $SECONDS -ge $end ]; then
      for pid in $(left); do ps -o pid,ppid,stat,args -p "$pid" >&2 || true; done
      die "round $round, target $target (seed $seed): waited in vain until $what"
    fi
    sleep 0.005
  done
}

kill_rest() {
  local pid rest
  rest=$(left)
  for pid in $rest; do kill -KILL "$pid" 2>/dev/null || true; done
  [ -z "$rest" ] && none_left
}
# A look may miss who is in an exec.
none_left() { [ -z "$(left)" ] && ! any_undecided && [ -z "$(left)" ]; }
no_socket_left() { [ "$(sockets)" -le "$sockets_before" ]; }
gone() { ! { cat "/proc/$1/environ" | tr '\0' '\n' | grep -qxF "$mark"; } 2>/dev/null; }
all_ready() { [ -e "$folder/ready.0" ] && [ -e "$folder/ready.1" ]; }

worker='
  sleep 300 &
  (setsid sh -c "trap \"\" TERM HUP INT; sleep 300; :" &)
  [ -z "${TORCHELASTIC_ERROR_FILE:-}" ] || echo something > "$TORCHELASTIC_ERROR_FILE"
  echo $$ > "$FOLDER/ready.$RANK"
  while echo line; do sleep 0.01; done
'

children() { cat /proc/"$1"/task/"$1"/children 2>/dev/null || true; }

random_below() {  # a random process of those below a pid, or nothing
  local all=() queue=("$1") pid
  while [ ${#queue[@]} -gt 0 ]; do
    pid=${queue[0]}
    queue=("${queue[@]:1}")
    for pid in $(children "$pid"); do
      all+=("$pid")
      queue+=("$pid")
    done
  done
  [ ${#all[@]} -eq 0 ] || echo "${all[RANDOM % ${#all[@]}]}"
}

target=none
for ((round = 1; round <= rounds; round++)); do
  rm -rf "${folder:?}"/*
  mkdir "$folder/tmp"
  options=(--nproc_per_node=2 --use_env --grace_period=0.05)
  [ $((RANDOM % 2)) = 0 ] || options+=(--tee=3)
  [ $((RANDOM % 2)) = 0 ] || options+=(--max_restarts=2)
  env "$mark" FOLDER="$folder" TMPDIR="$folder/tmp" \
    "$launch" "${options[@]}" sh -c "$worker" > "$folder/output" 2>&1 &
  job=$!
  # In half of the rounds it hits a job that is just starting.
  if [ $((RANDOM % 2)) = 0 ]; then
    await "the workers are there" all_ready
  else
    sleep "0.00$((RANDOM % 10))"
  fi

  guardian=$(children $job)
  guardian=${guardian%% *}
  target=$((RANDOM % 5))
  victims=()
  case $target in
    0) victims=($(random_below "$job")) ;;
    1) victims=("$job") ;;
    2) victims=($guardian) ;;
    3) victims=("$job" $([ -z "$guardian" ] || random_below "$guardian")) ;;
    # Both halves of the launcher: it is stopped first, so that it cannot clean up between the two.
    4)
      kill -STOP "$job" 2>/dev/null || true
      victims=($guardian "$job")
      ;;
  esac
  [ ${#victims[@]} -eq 0 ] || kill -KILL "${victims[@]}" 2>/dev/null || true
  if [ "$target" = 4 ]; then
    # Here what a worker has started may survive, as documented: the workers may not.
    wait $job 2>/dev/null || true
    for pid in $(cat "$folder"/ready.* 2>/dev/null); do
      await "worker $pid is gone" gone "$pid"
    done
    await "all the rest is killed" kill_rest
  else
    # Where the victim was one that ends no job, or nobody was there yet.
    kill -TERM "$job" 2>/dev/null || true
    wait $job 2>/dev/null || true
  fi
  await "no process is left" none_left

  if [ -n "$(ls -A "$folder/tmp")" ]; then die "round $round (seed $seed): files are left in TMPDIR"; fi
  [ -z "${sockets_before:-}" ] || await "no socket is left" no_socket_left
done
echo "kill_storm: $rounds rounds, no process, file${sockets_before:+, socket} left (seed $seed)"
