"""Checkpoints of sharded units have stock's format, also those in the middle of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.checkpoint_folder import TRACKER
from tests.helpers.ranks import RankPool
from tests.helpers.training import losses, train

JOB = (
    "--mock-data --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer "
    "--clip-grad 1.0 --swiglu --attention-dropout 0 --hidden-dropout 0"
)
OURS = (
    "--zero-bubble-schedule zero-pp --zero-bubble-exact --zero-bubble-shard-weights --zero-bubble-unit-microbatches 4"
)
EXPERTS = "--bf16 --num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall"


@pytest.mark.full
@pytest.mark.parametrize("options", ["", "--bf16", "--bf16 --no-dist-ckpt-optim-fully-reshardable", EXPERTS])
def test_stock_continues_ours_and_ours_stock(ranks: RankPool, tmp_path: Path, options: str) -> None:
    """Ours continues stock after its first iteration, and stock ours after its second: with the losses of stock."""
    job, stock, ours = f"{JOB} {options}", tmp_path / "stock", tmp_path / "ours"
    whole = losses(train(ranks, 4, f"{job} --save {stock} --save-interval 1 --exit-interval 3", tmp_path / "whole"))
    (stock / TRACKER).write_text("1")
    flags = f"{job} {OURS} --load {stock} --save {ours} --exit-interval 2"
    assert losses(train(ranks, 4, flags, tmp_path / "second")) == {2: whole[2]}
    flags = f"{job} --load {ours} --exit-interval 3"
    assert losses(train(ranks, 4, flags, tmp_path / "third")) == {3: whole[3]}
