#!/usr/bin/env bash
# Start GPT pretraining on this node: one process a GPU, by torchrun. Run it once on every node of the job.
#
#   NPROC=2 scripts/launch_torchrun.sh --config configs/gpt_tiny.yaml --zero-bubble-device cpu
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node-a scripts/launch_torchrun.sh --config configs/gpt_6.2b.yaml ...
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_torchrun.sh --dry-run --gpu-memory 80GiB --config ...
#
# NNODES         nodes of the job (default: 1)
# NODE_RANK      the number of this one, 0 to NNODES-1
# GPUS_PER_NODE  processes on every node (default: the GPUs that nvidia-smi lists); NPROC is another name for it
# MASTER_ADDR    the address of node 0, as the others reach it
# MASTER_PORT    a free port on node 0 (default: 29500; on a single node torchrun finds one)
# MEGATRON_PATH  a checkout of Megatron-LM, whose pretrain_gpt.py is run instead of ours, under our schedules
# PYTHON         the interpreter that megatron.zero_bubble is installed for (default: python)
#
# --dry-run starts nothing: it prints who would be where, the plan, the memory and the command of every node, or the
# sentence that says what is wrong. Its own options: --gpu-memory 80GiB, --gpu h100, --costs FILE. Every other argument
# goes to the training script.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python}"
nodes="${NNODES:-1}"

fail() {
    printf 'launch_torchrun.sh: %s\n' "$*" >&2
    exit 2
}

dry_run='' dry=() job=()
while (($#)); do
    case "$1" in
        --dry-run) dry_run=yes ;;
        --gpu-memory | --gpu | --costs)
            (($# > 1)) || fail "$1 takes a value, got none; give one"
            dry+=("$1" "$2")
            shift
            ;;
        *) job+=("$1") ;;
    esac
    shift
done
[[ -n "$dry_run" || ${#dry[@]} -eq 0 ]] ||
    fail "${dry[0]} belongs to --dry-run, which is not given; add it or drop both"

command -v "$python" >/dev/null || fail "needs the Python of the training, but there is no '$python'; name it in PYTHON"
processes="${NPROC:-${GPUS_PER_NODE:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}}"
for number in "$nodes" "$processes"; do
    [[ "$number" =~ ^[1-9][0-9]*$ ]] ||
        fail "NNODES and GPUS_PER_NODE must be 1 or more, got $nodes and $processes (without GPUS_PER_NODE: the GPUs" \
            "that nvidia-smi lists); set them"
done

if ((nodes == 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
    # Nobody else has to find this node: torchrun takes a port that is free.
    rendezvous=(--standalone)
else
    # The nodes have fixed numbers, not those of who came first: a tensor-parallel group then lies on one node, and the
    # ranks are where the dry run says.
    node="${NODE_RANK:-}" address="${MASTER_ADDR:-}"
    if [[ -n "$dry_run" ]]; then
        node=@node@ address="${address:-ADDRESS_OF_NODE_0}"
    fi
    [[ "$node" == @node@ || ("$node" =~ ^[0-9]+$ && "$node" -lt "$nodes") ]] ||
        fail "NODE_RANK must be 0 to $((nodes - 1)) with NNODES=$nodes, got '$node'; set another on every node"
    [[ -n "$address" ]] ||
        fail "MASTER_ADDR must name node 0 with NNODES=$nodes, got nothing; set the same on every node"
    rendezvous=(--node-rank "$node" --master-addr "$address" --master-port "${MASTER_PORT:-29500}")
fi

if [[ -n "${MEGATRON_PATH:-}" ]]; then
    [[ -f "$MEGATRON_PATH/pretrain_gpt.py" ]] ||
        fail "MEGATRON_PATH must be a checkout of Megatron-LM, got $MEGATRON_PATH without a pretrain_gpt.py; mend it"
    script=(-m megatron.zero_bubble.launch "$MEGATRON_PATH/pretrain_gpt.py")
    dry+=(--megatron-lm)
else
    script=("$root/scripts/pretrain_gpt.py")
fi

# What is set already stays as it is. None of this has been measured by us: it is what the runtime's order of operations
# asks for, and what tells why a connection failed; the rest of NCCL is left to NCCL and to the cluster's nccl.conf.
settings=(
    # One hardware queue a GPU: kernels start in the order in which the host issued them. Megatron asks for it with
    # tensor or context parallelism on GPUs before Blackwell, so that a collective starts before the matrix product that
    # is to hide it. For pipelines it means that a receive which waits for its sender holds up what was issued behind
    # it; our plans are proved free of deadlock under that rule, and refused at start-up if they are not. 8 is useful
    # without tensor and context parallelism, or from Blackwell on: what is issued behind a receive need not wait for
    # it. breadth-first needs 8.
    "CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # Neighbours in the pipeline connect once at start-up, one communicator a direction; where that fails, for want of a
    # network interface for example, WARN prints the reason and nothing else. INFO says which transport each pair took.
    "NCCL_DEBUG=${NCCL_DEBUG:-WARN}"
    # One thread a process for what the CPU computes: the processes of a node share its cores, and only issue kernels.
    "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
)
# These depend on the cluster, and are handed on when they are set:
#   NCCL_SOCKET_IFNAME  the interface on which ranks of other nodes find each other, where there are several; the
#                       pipeline's messages then go over what NCCL finds best, InfiniBand or RoCE before this interface.
#   GLOO_SOCKET_IFNAME  the same for gloo, which moves the messages of CPU ranks over it as well.
#   NCCL_IB_HCA         the adapters to use, where some are for storage; of these NCCL takes the nearest to the GPU.
#   NCCL_NET_GDR_LEVEL  up to which distance an adapter reads the GPU's memory itself; beyond it, messages between
#                       nodes are staged in host memory.
for name in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA NCCL_NET_GDR_LEVEL; do
    [[ -z "${!name:-}" ]] || settings+=("$name=${!name}")
done

launch=(env "${settings[@]}" "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$processes"
    "${rendezvous[@]}" "${script[@]}" ${job[@]+"${job[@]}"})
if [[ -n "$dry_run" ]]; then
    exec env "${settings[@]}" "$python" -m megatron.zero_bubble dry-run --nodes "$nodes" --gpus-per-node "$processes" \
        --launch-command "$(printf '%q ' "${launch[@]}")" ${dry[@]+"${dry[@]}"} -- ${job[@]+"${job[@]}"}
fi
exec "${launch[@]}"
