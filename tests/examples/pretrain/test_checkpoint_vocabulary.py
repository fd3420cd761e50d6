"""A checkpoint of a divided vocabulary is one of whole layers: stock continues it, and the other way round.

A vocabulary that is not divisible by the ranks has padding, whose size may differ between the checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import pass_on, tensors
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.training import losses, train

MODEL = "--mock-data --num-layers 4 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 6"
STOCK = f"{MODEL} --pipeline-model-parallel-size 2"
DIVIDED = f"{MODEL} --pipeline-model-parallel-size 4 --zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2"
VEE = f"{MODEL} --pipeline-model-parallel-size 2 --zero-bubble-schedule zb-v --zero-bubble-vocabulary-parallel 1"
UNTIED = "--untie-embeddings-and-output-weights"
DISTRIBUTED = "--use-distributed-optimizer"


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        pytest.param((2, STOCK), (4, DIVIDED), UNTIED, marks=pytest.mark.full),
        pytest.param((4, DIVIDED), (2, STOCK), "", marks=pytest.mark.full),
        pytest.param((2, VEE), (2, STOCK), f"{UNTIED} {DISTRIBUTED}", marks=pytest.mark.full),
        pytest.param((4, DIVIDED), (2, VEE), DISTRIBUTED, marks=pytest.mark.full),
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


def job(pipeline: int, tensor: int = 1, schedule: str = "") -> tuple[int, str]:
    """Number of ranks and flags of a job."""
    sizes = f"--pipeline-model-parallel-size {pipeline} --tensor-model-parallel-size {tensor}"
    return pipeline * tensor, f"{MODEL} {sizes} {schedule}"


ZB_H1 = "--zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 2"
ZB_V = "--zero-bubble-schedule zb-v --zero-bubble-vocabulary-parallel 1"
PADDING = "--make-vocab-size-divisible-by 1"
# Not tied: in the state that is resharded, stock misplaces what follows the embedding of a tied last stage, if that
# embedding is no multiple of 64 elements per rank.
FULLY = f"{UNTIED} {DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
JOBS = {
    "tied": (job(2), job(4, 1, ZB_H1), job(1), ""),
    "distributed optimizer, padding": (job(2), job(4, 1, ZB_H1), job(1), f"{FULLY} {PADDING}"),
    "tensor parallel, padding, V": (job(2), job(2, 2, ZB_V), job(1, 2), f"{UNTIED} {PADDING}"),
    "first divided, tied, padding": (job(4, 1, ZB_H1), job(2), job(2, 1, ZB_V), PADDING),
}
TOKENS = 257
"""Without padding."""


@pytest.mark.parametrize("name", some(JOBS, "first divided, tied, padding"))
def test_a_checkpoint_is_the_same_bits_after_another_division(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Weights and Adam moments, loaded and saved by a job with another division, and then by a third one."""
    first, second, third, options = JOBS[name]
    train(ranks, first[0], f"{first[1]} {options} --save {tmp_path}/0 --exit-interval 2")
    for at, (num_ranks, flags) in enumerate((second, third)):
        pass_on(ranks, num_ranks, f"{flags} {options} --load {tmp_path}/{at} --save {tmp_path}/{at + 1}")
    begun, *later = (tensors(ranks, tmp_path / str(at)) for at in range(3))
    moments = [key for key in begun if "exp_avg_sq" in key and "word_embeddings" in key]
    assert moments and all(begun[key].any() for key in moments)
    for found in later:
        assert found.keys() == begun.keys()
        for key, tensor in begun.items():
            assert torch.equal(without_padding(key, found[key]), without_padding(key, tensor)), key


def without_padding(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of tokens, of a layer of the vocabulary; other tensors whole."""
    return tensor[:TOKENS] if "word_embeddings" in key or "output_layer" in key else tensor
