#!/usr/bin/env bash
#SBATCH --job-name=ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# A training job under SLURM: on each node one launcher, which starts a process for each of the node's GPUs. It reads
# from SLURM how many nodes there are, which one it is on, and where the ranks meet.
#
#   sbatch [OPTIONS] samples/slurm.sh PROGRAM ARGUMENTS...
#
# LAUNCH names the launcher where it is not in the PATH. Nodes without GPUs: LAUNCH_ARGUMENTS=--nproc-per-node=N.
set -euo pipefail
if [ $# = 0 ]; then
  echo "usage: sbatch [OPTIONS] samples/slurm.sh PROGRAM ARGUMENTS..." >&2
  exit 2
fi
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${LAUNCH:-launch}" ${LAUNCH_ARGUMENTS:---nproc-per-node=gpu} "$@"
