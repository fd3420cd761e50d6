"""Whole training runs on the rank pool, and readers of their metrics files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.ranks import RankPool

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 6 --lr 1e-3 --make-vocab-size-divisible-by 8 --eval-iters 0 --log-interval 1 "
    "--zero-bubble-device cpu"
)


def run(rank: int, num_ranks: int, flags: Sequence[str]) -> None:
    """Run one rank of ``pretrain_gpt.py`` in the pool's process group."""
    from megatron.zero_bubble.integration.patching import revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from pretrain.process import Launch
    from pretrain.run import train

    args = parse(flags)
    check(args, num_ranks)
    try:
        train(args, Launch(rank, num_ranks, rank, num_ranks, under_torchrun=True))
    finally:
        revert()


def train(ranks: RankPool, num_ranks: int, flags: str, metrics: Path | None = None) -> list[dict[str, Any]]:
    """Train with ``SMALL`` and ``flags``; return the records of the metrics file, empty without one."""
    words = [*SMALL.split(), *flags.split()]
    if metrics is not None:
        words += ["--metrics-file", str(metrics)]
    ranks.run(num_ranks, run, num_ranks, words, timeout=100)
    return [] if metrics is None else read_metrics(metrics)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(lines: Sequence[dict[str, Any]], kind: str = "train") -> dict[int, tuple[Any, ...]]:
    """Return a run's exact results per iteration."""
    names = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples")
    return {line["iteration"]: tuple(line.get(name) for name in names) for line in lines if line["kind"] == kind}
