#!/usr/bin/env bash
# Start GPT pretraining under SLURM: run scripts/launch_torchrun.sh on every node of an allocation.
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/launch_slurm.sh --config configs/gpt_6.2b.yaml ...
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_slurm.sh --config configs/gpt_6.2b.yaml ...     calls sbatch as above
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_slurm.sh --dry-run --gpu-memory 80GiB --config ...     allocates nothing
#
# Inside an allocation, variables that are not set get values from SLURM: NNODES from SLURM_JOB_NUM_NODES, NODE_RANK
# from SLURM_NODEID, GPUS_PER_NODE from SLURM_GPUS_ON_NODE, MASTER_ADDR from the first name of SLURM_JOB_NODELIST,
# MASTER_PORT from the job's id. launch_torchrun.sh explains these variables, MEGATRON_PATH and PYTHON. Partition,
# account and time limit are set by SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, or by options of sbatch. If
# sbatch is not called from the checkout, ZB_ROOT must name it.

#SBATCH --job-name=zero-bubble
#SBATCH --output=%x-%j.out
# One task per node: torchrun, which starts one process per GPU.
#SBATCH --ntasks-per-node=1
# Another job's processes on the same cores would delay some ranks, and so all of them.
#SBATCH --exclusive
set -euo pipefail

fail() {
    printf 'launch_slurm.sh: %s\n' "$*" >&2
    exit 2
}

# sbatch runs a copy of this file from another directory.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -f "$here/scripts/launch_torchrun.sh" ]] || here="${SLURM_SUBMIT_DIR:-$here}"
export ZB_ROOT="${ZB_ROOT:-$here}"
launcher="$ZB_ROOT/scripts/launch_torchrun.sh"
[[ -f "$launcher" ]] ||
    fail "cannot find $launcher; call sbatch from the checkout, or set ZB_ROOT to it"

if [[ -n "${SLURM_JOB_ID:-}" ]]; then
    export NNODES="${NNODES:-$SLURM_JOB_NUM_NODES}"
    [[ "$NNODES" == "$SLURM_JOB_NUM_NODES" ]] ||
        fail "NNODES must be the number of allocated nodes, $SLURM_JOB_NUM_NODES, got $NNODES; unset it"
    if [[ -z "${NPROC:-}${GPUS_PER_NODE:-}" && -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
        export GPUS_PER_NODE="$SLURM_GPUS_ON_NODE"
    fi
fi

for argument in "$@"; do
    if [[ "$argument" == -h || "$argument" == --help ]]; then
        sed -n '2,/^$/{/^$/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
    fi
    if [[ "$argument" == --dry-run ]]; then
        # Their values are known only inside the job.
        export MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}" MASTER_PORT="${MASTER_PORT:-PORT_OF_THE_JOB}"
        exec bash "$launcher" "$@"
    fi
done

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    command -v sbatch >/dev/null || fail "cannot find sbatch, which submits the job; run this on a login node of SLURM"
    submit=(sbatch --nodes "${NNODES:-1}")
    [[ -z "${GPUS_PER_NODE:-}" ]] || submit+=(--gpus-per-node "$GPUS_PER_NODE")
    exec "${submit[@]}" "$ZB_ROOT/scripts/launch_slurm.sh" "$@"
fi

if [[ -z "${MASTER_ADDR:-}" ]]; then
    # Not piped to `head`: when head exits, scontrol dies if it is still writing, and this script with it.
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" ||
        fail "needs node names from 'scontrol show hostnames $SLURM_JOB_NODELIST', which failed; set MASTER_ADDR"
    MASTER_ADDR="${hosts%%$'\n'*}"
fi
# Two jobs may share node 0 if --exclusive is not granted, so the port depends on the job's id.
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

# --kill-on-bad-exit: if one node fails, end the others, which would wait for it. --cpus-per-task: use all cores of the
# node, because srun would bind the task to one core. SLURM_NODEID differs between nodes, so every node reads its own.
# --ntasks: an allocation with one task per GPU sets SLURM_NTASKS, which srun would prefer to --ntasks-per-node.
step=(srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1)
[[ -z "${SLURM_CPUS_ON_NODE:-}" ]] || step+=(--cpus-per-task "$SLURM_CPUS_ON_NODE")
# shellcheck disable=SC2016
exec "${step[@]}" bash -c 'NODE_RANK="$SLURM_NODEID" exec bash "$0" "$@"' "$launcher" "$@"
