"""A checkpoint of a divided vocabulary is one of whole layers: stock continues it, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.training import losses, train

MODEL = "--mock-data --num-layers 4 --attention-dropout 0 --hidden-dropout 0"
STOCK = f"{MODEL} --pipeline-model-parallel-size 2"
DIVIDED = f"{MODEL} --pipeline-model-parallel-size 4 --zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2"
VEE = f"{MODEL} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v --zero-bubble-vocabulary-parallel 1"
UNTIED = "--untie-embeddings-and-output-weights"
DISTRIBUTED = "--use-distributed-optimizer"


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        ((2, STOCK), (4, DIVIDED), UNTIED),
        ((4, DIVIDED), (2, STOCK), ""),
        ((2, VEE), (2, STOCK), f"{UNTIED} {DISTRIBUTED}"),
        ((4, DIVIDED), (2, VEE), DISTRIBUTED),
    ],
    ids=["stock to divided", "divided to stock, tied", "V to stock, distributed optimizer", "divided to V, tied"],
)
def test_training_continues_with_another_division(
    ranks: RankPool, tmp_path: Path, first: tuple[int, str], second: tuple[int, str], options: str
) -> None:
    """The losses after moving the checkpoint equal those without; a lost Adam moment would change them at once."""
    cut = f"{options} --save {tmp_path}/saved --exit-interval 3"
    begun = losses(train(ranks, first[0], f"{first[1]} {cut}", tmp_path / "begun"))
    whole = losses(train(ranks, first[0], f"{first[1]} {options} --load {tmp_path}/saved", tmp_path / "whole"))
    moved = losses(train(ranks, second[0], f"{second[1]} {options} --load {tmp_path}/saved", tmp_path / "moved"))
    assert list(begun) == [1, 2, 3] and list(whole) == list(moved) == [4, 5, 6]
    for iteration, (loss, *_) in whole.items():
        assert moved[iteration][0] == pytest.approx(loss, rel=1e-5), iteration
