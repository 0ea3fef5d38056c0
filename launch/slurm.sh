#!/usr/bin/env bash
# One process a node under SLURM: launch/slurm.sh [--dry-run] [--nodes=2] [--gpus=8] [--sbatch=OPTION ...] -- TRAIN ARGUMENTS
# The workdir must be on a file system of all nodes. Two minutes before its time is over the job is told (SIGTERM), saves, exits
# with 75, and is queued again under the same number; so it is after a preemption. More options of sbatch: --sbatch=--partition=x.
set -euo pipefail

nodes=2 gpus=8 run=() more=()
while (($#)); do
  case $1 in
    --dry-run) run=(echo) ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus=*) gpus=${1#*=} ;;
    --sbatch=*) more+=("${1#*=}") ;;
    --) shift && break ;;
    *) echo "unknown: $1 (arguments of jaxagent train follow --)" >&2 && exit 2 ;;
  esac
  shift
done
(($#)) || { echo "nothing to train: ... -- --config=FILE --workdir=DIR" >&2; exit 2; }

# JAX gives a task of SLURM one GPU unless it is told which it has. A host that exits, with 75 too, must not get the others killed
# while they save; one that dies is noticed by the others, which then end by themselves.
ids=$(seq -s, 0 $((gpus - 1)))
train="JAX_LOCAL_DEVICE_IDS=$ids srun --kill-on-bad-exit=0 ${JAXAGENT:-jaxagent} train ${*@Q}"
script="$train; code=\$?; [ \$code -ne 75 ] || scontrol requeue \$SLURM_JOB_ID; exit \$code"
"${run[@]}" sbatch --job-name=jaxagent "--nodes=$nodes" --ntasks-per-node=1 "--gpus-per-node=$gpus" --exclusive --requeue \
  --open-mode=append --signal=TERM@120 "${more[@]}" --wrap="$script"
