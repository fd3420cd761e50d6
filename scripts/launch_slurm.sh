#!/usr/bin/env bash
# Start GPT pretraining under SLURM: scripts/launch_torchrun.sh on every node of an allocation.
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/launch_slurm.sh --config configs/gpt_6.2b.yaml ...
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_slurm.sh --config configs/gpt_6.2b.yaml ...     submits itself like that
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_slurm.sh --dry-run --gpu-memory 80GiB --config ...     allocates nothing
#
# Inside an allocation everything follows from SLURM: NNODES from SLURM_JOB_NUM_NODES, NODE_RANK from SLURM_NODEID,
# GPUS_PER_NODE from SLURM_GPUS_ON_NODE, MASTER_ADDR from the first name of SLURM_JOB_NODELIST, MASTER_PORT from the
# job's number. What is set already stays as it is; launch_torchrun.sh explains each, with MEGATRON_PATH and PYTHON.
# Partition, account and time limit are SLURM's own: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, or options of
# sbatch. ZB_ROOT is the checkout, where sbatch is not called from it.

#SBATCH --job-name=zero-bubble
#SBATCH --output=%x-%j.out
# One task a node: torchrun, which starts a process a GPU.
#SBATCH --ntasks-per-node=1
# Another job's processes on the same cores would delay some ranks, and so all of them.
#SBATCH --exclusive
set -euo pipefail

fail() {
    printf 'launch_slurm.sh: %s\n' "$*" >&2
    exit 2
}

# sbatch runs a copy of this file in a directory of its own.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -f "$here/scripts/launch_torchrun.sh" ]] || here="${SLURM_SUBMIT_DIR:-$here}"
export ZB_ROOT="${ZB_ROOT:-$here}"
launcher="$ZB_ROOT/scripts/launch_torchrun.sh"
[[ -f "$launcher" ]] ||
    fail "needs the checkout, but there is no $launcher; call sbatch from it, or name it in ZB_ROOT"

if [[ -n "${SLURM_JOB_ID:-}" ]]; then
    export NNODES="${NNODES:-$SLURM_JOB_NUM_NODES}"
    [[ "$NNODES" == "$SLURM_JOB_NUM_NODES" ]] ||
        fail "NNODES must be the nodes of the allocation, $SLURM_JOB_NUM_NODES, got $NNODES; unset it or allocate more"
    if [[ -z "${NPROC:-}${GPUS_PER_NODE:-}" && -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
        export GPUS_PER_NODE="$SLURM_GPUS_ON_NODE"
    fi
fi

for argument in "$@"; do
    if [[ "$argument" == --dry-run ]]; then
        # Only the job knows these.
        export MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}" MASTER_PORT="${MASTER_PORT:-PORT_OF_THE_JOB}"
        exec bash "$launcher" "$@"
    fi
done

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    command -v sbatch >/dev/null || fail "needs sbatch to submit the job, but there is none here; log in where SLURM is"
    submit=(sbatch --nodes "${NNODES:-1}")
    [[ -z "${GPUS_PER_NODE:-}" ]] || submit+=(--gpus-per-node "$GPUS_PER_NODE")
    exec "${submit[@]}" "$ZB_ROOT/scripts/launch_slurm.sh" "$@"
fi

if [[ -z "${MASTER_ADDR:-}" ]]; then
    # Read whole: a `head` that has its line and is gone kills an scontrol which still writes, and with it this script.
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" ||
        fail "needs the nodes' names from 'scontrol show hostnames $SLURM_JOB_NODELIST', which failed; set MASTER_ADDR"
    MASTER_ADDR="${hosts%%$'\n'*}"
fi
# Two jobs may share node 0 where --exclusive is not granted: their ports differ as their numbers do.
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

# --kill-on-bad-exit: a node that fails ends the others, which would wait for it. --cpus-per-task: all cores of the
# node, for srun binds a task to one of them otherwise. SLURM_NODEID differs from node to node, so it is read there.
step=(srun --nodes "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1)
[[ -z "${SLURM_CPUS_ON_NODE:-}" ]] || step+=(--cpus-per-task "$SLURM_CPUS_ON_NODE")
# shellcheck disable=SC2016
exec "${step[@]}" bash -c 'NODE_RANK="$SLURM_NODEID" exec bash "$0" "$@"' "$launcher" "$@"
