#!/usr/bin/env bash
# Start GPT pretraining on this node: one process per GPU, by torchrun. Run it once on every node of the job.
#
#   NPROC=2 scripts/launch_torchrun.sh --config configs/gpt_tiny.yaml --zero-bubble-device cpu
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node-a scripts/launch_torchrun.sh --config configs/gpt_6.2b.yaml ...
#   NNODES=4 GPUS_PER_NODE=8 scripts/launch_torchrun.sh --dry-run --gpu-memory 80GiB --config ...
#
# NNODES         number of nodes of the job (default: 1)
# NODE_RANK      number of this node, 0 to NNODES-1
# GPUS_PER_NODE  processes per node (default: the number of GPUs that nvidia-smi lists); NPROC is an alias
# MASTER_ADDR    address of node 0, as the other nodes reach it
# MASTER_PORT    a free port on node 0 (default: 29500; on a single node torchrun finds one)
# MEGATRON_PATH  checkout of Megatron-LM, whose pretrain_gpt.py runs under our schedules instead of our script
# PYTHON         the interpreter that megatron.zero_bubble is installed for (default: python)
#
# --dry-run starts nothing: it prints the placement of the ranks, the plan, the memory and the command of every node, or
# the error that the job would end with. Its options are --gpu-memory 80GiB, --gpu h100 and --costs FILE. All other
# arguments go to the training script, whose flags python scripts/pretrain_gpt.py --help lists.
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
        -h | --help)
            sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit
            ;;
        --dry-run) dry_run=yes ;;
        --gpu-memory | --gpu | --costs)
            (($# > 1)) || fail "$1 takes a value, got none; give one"
            dry+=("$1" "$2")
            shift
            ;;
        --gpu-memory=* | --gpu=* | --costs=*) dry+=("$1") ;;
        *) job+=("$1") ;;
    esac
    shift
done
[[ -n "$dry_run" || ${#dry[@]} -eq 0 ]] ||
    fail "${dry[0]} requires --dry-run; add --dry-run or drop ${dry[0]}"

command -v "$python" >/dev/null || fail "cannot find the Python interpreter '$python'; set PYTHON"
processes="${NPROC:-${GPUS_PER_NODE:-$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)}}"
for number in "$nodes" "$processes"; do
    [[ "$number" =~ ^[1-9][0-9]*$ ]] ||
        fail "NNODES and GPUS_PER_NODE must be 1 or more, got $nodes and $processes (by default, GPUS_PER_NODE is the" \
            "number of GPUs that nvidia-smi lists); set them"
done

if ((nodes == 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
    # No other node has to find this one, so torchrun can choose a free port.
    rendezvous=(--standalone)
else
    # Nodes have fixed numbers, not those of arrival order, so that a tensor-parallel group lies on one node and the
    # ranks are where the dry run shows them.
    node="${NODE_RANK:-}" address="${MASTER_ADDR:-}"
    if [[ -n "$dry_run" ]]; then
        node=@node@ address="${address:-ADDRESS_OF_NODE_0}"
    fi
    [[ "$node" == @node@ || ("$node" =~ ^[0-9]+$ && "$node" -lt "$nodes") ]] ||
        fail "NODE_RANK must be 0 to $((nodes - 1)) with NNODES=$nodes, got '$node'; set a different one on every node"
    [[ -n "$address" ]] ||
        fail "MASTER_ADDR must name node 0 with NNODES=$nodes, got nothing; set the same address on every node"
    rendezvous=(--node-rank "$node" --master-addr "$address" --master-port "${MASTER_PORT:-29500}")
fi

if [[ -n "${MEGATRON_PATH:-}" ]]; then
    [[ -f "$MEGATRON_PATH/pretrain_gpt.py" ]] ||
        fail "MEGATRON_PATH must be a checkout of Megatron-LM, got $MEGATRON_PATH without a pretrain_gpt.py; correct it"
    script=(-m megatron.zero_bubble.launch "$MEGATRON_PATH/pretrain_gpt.py")
    dry+=(--megatron-lm)
else
    script=("$root/scripts/pretrain_gpt.py")
fi

# Variables that are already set keep their values. We have not measured the effect of these defaults: they follow from
# the runtime's order of operations, or show why a connection failed. All other settings of NCCL are left to NCCL and to
# the cluster's nccl.conf.
settings=(
    # One hardware queue per GPU: kernels start in the order in which the host issued them. Megatron requires it with
    # tensor or context parallelism on GPUs before Blackwell, so that a collective starts before the matrix product that
    # hides it. In a pipeline, a receive that waits for its sender then delays all work issued after it. Our plans are
    # proved free of deadlock under that rule: a schedule that was asked for by name is refused if it is not, and one
    # that zb-auto plans during the run is then not adopted. 32 is useful without tensor and context parallelism, or from
    # Blackwell on: work issued after a receive then need not wait for it. A rank has eight or more streams, which share
    # queues at random if there are fewer than 32. Where a schedule needs it, as breadth-first and pairs under dualpipe-v
    # do, the dry run and `zero-bubble advise` say so.
    "CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # Load all kernels of CUDA's libraries at start-up. By default, CUDA loads a kernel when it is launched for the first
    # time, and may then wait until everything on the GPU has ended, also a receive of NCCL whose message depends on what
    # this rank has not launched yet. The first iterations avoid that by sending nothing over NCCL; this setting covers
    # later ones with other shapes. It takes memory of the GPU, and does not load what Triton compiles.
    "CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}"
    # Grow the allocator's segments in place. When memory runs short, torch otherwise frees cached segments by cudaFree,
    # which waits for everything on the GPU, as above; to shrink these, it waits only for the stream that used them.
    # Megatron's --use-nccl-ub requires expandable_segments:False.
    "PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-${PYTORCH_ALLOC_CONF:-expandable_segments:True}}"
    # Neighbours in the pipeline connect once at start-up, with one communicator per direction. If that fails, for
    # example because a network interface is missing, WARN prints the reason. INFO adds the transport of each pair.
    "NCCL_DEBUG=${NCCL_DEBUG:-WARN}"
    # One CPU thread per process: the processes of a node share its cores, and only launch kernels.
    "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
)
# These variables depend on the cluster, and are passed on if they are set:
#   NCCL_SOCKET_IFNAME  the interface on which ranks of different nodes find each other, if there are several; for the
#                       pipeline's messages, NCCL chooses the best network and prefers InfiniBand or RoCE to it.
#   GLOO_SOCKET_IFNAME  the same for gloo, which also sends the messages of CPU ranks over it.
#   NCCL_IB_HCA         the adapters to use, if some are for storage; NCCL takes the one nearest to the GPU.
#   NCCL_NET_GDR_LEVEL  maximum distance at which an adapter reads the GPU's memory directly; beyond it, messages
#                       between nodes are staged in host memory.
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
