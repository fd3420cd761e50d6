"""A subset of Megatron's flags: those for pipelines, and those that zero-bubble schedules do not support."""

import argparse
from typing import Any

from megatron.zero_bubble.planning.job.options import add_options

_NUMBERS = {
    "pipeline-model-parallel-size": 1,
    "num-layers": 4,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "tensor-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "tensor-parallel-num-weight-shards": None,
    "expert-tensor-parallel-num-weight-shards": None,
    "distributed-timeout-minutes": 10,
    "micro-batch-size": 1,
    "global-batch-size": 6,
    "eval-iters": 1,
    "train-iters": 10,
    "train-samples": None,
    "save-interval": None,
    "seq-length": 32,
    "data-parallel-size": 1,
    "num-experts": None,
    "expert-model-parallel-size": 1,
    "recompute-num-layers": None,
}
_SWITCHES = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "account-for-embedding-in-pipeline-split",
    "untie-embeddings-and-output-weights",
    "bf16",
    "fp16",
)


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags and return the parser, as upstream does."""
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in (*_SWITCHES, "account-for-loss-in-pipeline-split"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in (
        "pipeline-model-parallel-layout",
        "hybrid-layer-pattern",
        "save",
        "load",
        "recompute-granularity",
        "recompute-method",
    ):
        parser.add_argument(f"--{name}")
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    parser.add_argument("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--rampup-batch-size", nargs=3, type=int)
    parser.add_argument("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    for name in ("step-batch-size-schedule", "fp8", "moe-router-load-balancing-type"):
        parser.add_argument(f"--{name}")
    add_options(parser)
    return parser


def parse_args() -> argparse.Namespace:
    """Parse the flags and reject unknown ones, as upstream does."""
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()


def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (as upstream)
    """Derive values from other flags, e.g. the number of stages per rank, as upstream does."""
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    # Since 0.19: the default is one shard per rank.
    args.tensor_parallel_num_weight_shards = args.tensor_parallel_num_weight_shards or args.tensor_model_parallel_size
    args.expert_tensor_parallel_num_weight_shards = (
        args.expert_tensor_parallel_num_weight_shards or args.expert_tensor_parallel_size
    )
    return args
