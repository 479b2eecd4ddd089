#!/usr/bin/env bash
# Jobs of several nodes with the static rendezvous.
#
#   nodes_test.sh NAME LAUNCH WORKER
. "$(dirname "$0")/nodes.sh"

static() { echo --nnodes="$1" --node_rank="$2" --master_addr=10.77.0.1 --use_env; }

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
    make_slurm_step
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
