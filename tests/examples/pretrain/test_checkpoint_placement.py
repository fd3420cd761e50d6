"""A checkpoint written under one schedule and pipeline size continues under any other, optimizer state included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.training import losses, train

MODEL = "--mock-data --num-layers 8 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8"
LINEAR = f"{MODEL} --pipeline-model-parallel-size 4"
VEE = f"{MODEL} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v"
LOOPED = f"{MODEL} --pipeline-model-parallel-size 2 --zero-bubble-schedule interleaved-1f1b"
INTERLEAVED = f"{MODEL} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
AUTO = f"{MODEL} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-auto --zero-bubble-num-chunks 4"
LOOP, WAVE = (f"{AUTO} --zero-bubble-placement {name}" for name in ("loop", "wave"))
DISTRIBUTED = "--use-distributed-optimizer --bf16"


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        pytest.param((4, LINEAR), (2, VEE), "", marks=pytest.mark.full),
        pytest.param((2, VEE), (4, LINEAR), "", marks=pytest.mark.full),
        ((4, LINEAR), (4, VEE), DISTRIBUTED),
        pytest.param(
            (2, VEE), (2, LOOPED), f"{DISTRIBUTED} --untie-embeddings-and-output-weights", marks=pytest.mark.full
        ),
        pytest.param((4, LINEAR), (2, WAVE), "", marks=pytest.mark.full),
        pytest.param((2, WAVE), (2, INTERLEAVED), DISTRIBUTED, marks=pytest.mark.full),
        pytest.param((2, INTERLEAVED), (2, LOOP), "", marks=pytest.mark.full),
        pytest.param((2, LOOP), (4, LINEAR), DISTRIBUTED, marks=pytest.mark.full),
    ],
    ids=[
        "1f1b p=4 to zb-v p=2",
        "zb-v p=2 to 1f1b p=4",
        "distributed optimizer, d=1 to d=2",
        "zb-v to interleaved",
        "1f1b p=4 to a wave",
        "a wave to stock interleaved",
        "stock interleaved to a loop",
        "a loop to 1f1b p=4",
    ],
)
def test_training_continues_with_another_schedule_and_size(
    ranks: RankPool, tmp_path: Path, first: tuple[int, str], second: tuple[int, str], options: str
) -> None:
    """The losses after moving the checkpoint equal those without; a lost Adam moment would change them at once."""
    cut = f"{options} --save {tmp_path}/saved --exit-interval 3"
    begun = losses(train(ranks, first[0], f"{first[1]} {cut}", tmp_path / "begun"))
    whole = losses(train(ranks, first[0], f"{first[1]} {options} --load {tmp_path}/saved", tmp_path / "whole"))
    moved = losses(train(ranks, second[0], f"{second[1]} {options} --load {tmp_path}/saved", tmp_path / "moved"))
    assert list(begun) == [1, 2, 3] and list(whole) == list(moved) == [4, 5, 6]
    for iteration, (loss, *_) in whole.items():
        # The gradient norm, and therefore the clipped step, is equal only up to rounding.
        assert moved[iteration][0] == pytest.approx(loss, rel=1e-5 if not options else 2e-3), iteration
