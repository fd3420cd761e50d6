"""The features whose worth no GPU has shown yet, as data: since when they exist, what promotes and what removes each.

A feature stays here until the steps that measure it have succeeded on a GPU (``docs/gpu_day.json``); tests hold that no
row outlives them. Its results are the same as without it, which CPU ranks prove; what is open is whether it pays.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unmeasured:
    """One feature.

    Attributes:
        feature: what it is.
        flags: those of a job that turn it on, with their values.
        since: the date of its first commit.
        steps: the names of the steps of a GPU day that measure it; empty where one GPU cannot, or no step exists yet.
        promotes: the measurement after which the row goes, and the feature stays.
        removes: the measurement after which the feature goes.
    """

    feature: str
    flags: str
    since: str
    steps: tuple[str, ...]
    promotes: str
    removes: str


UNMEASURED = (
    Unmeasured(
        "W of TransformerEngine's linears, in bf16 and FP8",
        "`--transformer-impl transformer_engine`",
        "2026-11-21",
        ("parity", "memory until W in FP8"),
        "gradients equal to those of stock, and the memory until W that the planner counts",
        "gradients that differ and cannot be fixed: then TransformerEngine's linears compute W in B",
    ),
    Unmeasured(
        "W of the grouped linears of TransformerEngine's fused operations",
        "`--use-transformer-engine-op-fuser`, with experts",
        "2026-11-29",
        ("parity",),
        "gradients equal to those that B computes, in bf16 and MXFP8",
        "gradients that differ and cannot be fixed: then fused operations compute W in B",
    ),
    Unmeasured(
        "the paged stash of experts under another order than Megatron's",
        "`--moe-paged-stash`",
        "2026-11-29",
        (),
        "losses equal to those without it, and less memory, with experts over two or more GPUs",
        "an order that its manager does not accept",
    ),
    Unmeasured(
        "Megatron's fine-grained offloading of activations, with W after B",
        "`--fine-grained-activation-offloading`",
        "2026-11-29",
        (),
        "losses equal to those without it, and less memory, on two or more GPUs",
        "less memory saved than `--zero-bubble-offload` saves in the same time",
    ),
    Unmeasured(
        "CUDA graphs of stages, by slots",
        "`--cuda-graph-impl local`",
        "2026-11-29",
        ("graphs, small", "graphs", "graphs against runs without, over NCCL"),
        "the bits of runs without graphs, and iterations, at a hidden size of 1024, of at most 1.25 times what the GPU "
        "computes",
        "bits that differ, or no gain where the host is the limit",
    ),
    Unmeasured(
        "CUDA graphs of TransformerEngine, by slots",
        "`--cuda-graph-impl transformer_engine`",
        "2026-11-29",
        (),
        "losses equal to those without graphs, and a shorter iteration, on two or more GPUs",
        "captures that fail, or losses that differ",
    ),
    Unmeasured(
        "vocabulary parallelism on one hardware queue",
        "`--zero-bubble-vocabulary-parallel` with `CUDA_DEVICE_MAX_CONNECTIONS=1`",
        "2026-11-28",
        ("one queue",),
        "runs that end, with the results of several queues",
        "a run that hangs: then it needs several queues again",
    ),
    Unmeasured(
        "the time that vocabulary parallelism saves",
        "`--zero-bubble-vocabulary-parallel`",
        "2026-11-24",
        (),
        "an iteration within 3 % of its prediction, with a vocabulary of 128,000 and one GPU per rank",
        "a layout by cost that is as fast in as little memory",
    ),
    Unmeasured(
        "pairs that hide the all-to-all of experts",
        "`--zero-bubble-overlap-experts`",
        "2026-11-26",
        (),
        "an iteration that is shorter than that of Megatron's own overlap, with experts over two or more GPUs",
        "an iteration that is longer with few microbatches and with many",
    ),
    Unmeasured(
        "sharded units",
        "`--zero-bubble-shard-weights`",
        "2026-11-25",
        (),
        "collectives of units that hide beneath passes between two or more GPUs",
        "more time lost than Megatron's own sharding of weights loses in the same memory",
    ),
    Unmeasured(
        "shards exchanged on demand, in symmetric memory",
        "`--zero-bubble-shard-weights on-demand`",
        "2026-11-25",
        (),
        "replicas with uneven work that wait less than by collectives, on two or more GPUs",
        "no gain over collectives in a unit of any size",
    ),
    Unmeasured(
        "replicas with different numbers of microbatches",
        "`--zero-bubble-balance-microbatches`",
        "2026-11-25",
        (),
        "tokens per second of documents of different lengths, against equally many microbatches, on two or more GPUs",
        "packing into microbatches of equal length that is as fast",
    ),
    Unmeasured(
        "slices of sequences with few microbatches",
        "`--zero-bubble-schedule seq-zb-h1`",
        "2026-11-24",
        ("advice, few microbatches",),
        "an iteration within 5 % of its prediction",
        "slices that lose more time to smaller products than the pipeline gains",
    ),
    Unmeasured(
        "receives that are posted late",
        "`--zero-bubble-post-receives late`",
        "2026-11-24",
        (),
        "a shorter iteration than with early receives, in any published recipe",
        "none that is shorter, on GPUs with NVLink and between nodes",
    ),
    Unmeasured(
        "another number of CTAs than the default",
        "`--zero-bubble-nccl-ctas`",
        "2026-11-24",
        (),
        "a number that is better than the default by more than 1 %, between GPUs or between nodes",
        "none that is",
    ),
)
"""The oldest question first where several features depend on it."""
