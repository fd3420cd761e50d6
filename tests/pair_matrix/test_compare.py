"""Tests that the pair matrix finds planted differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pair_matrix.compare import differences
from pair_matrix.options import row_of
from pair_matrix.train import TrainingResult
from tests.helpers.parity import Outcome

SAMPLES = ("2 0x1p-10 0", "4 0x1p-10 0")
LOSSES = ("0x1.8p+2", "0x1.7p+2")
ROWS = ("wgrad=fused", "wgrad=fused dtype=fp16", "wgrad=fused dtype=bf16", "schedule=zb-h1", "schedule=zb-v")
"""Three with tolerances, bits, and bits of the model."""


def trained() -> TrainingResult:
    start = {"a": torch.linspace(-1, 1, 64), "b": torch.ones(8)}
    weights = {name: weight + 1e-2 * torch.sign(weight) for name, weight in start.items()}
    outcome = Outcome(LOSSES, ("0x1p+0", "0x1.1p+0"), {}, ("state",), (1024.0,) * 2, (), Counter(), (), SAMPLES)
    return TrainingResult(outcome, weights, start)


def found(text: str, spoil: Callable[[TrainingResult], TrainingResult]) -> list[str]:
    stock = trained()
    return differences(row_of(text), [{"stock": stock, "schedule": spoil(trained())}] * 2)


def with_outcome(**figures: object) -> Callable[[TrainingResult], TrainingResult]:
    return lambda done: replace(done, outcome=replace(done.outcome, **figures))  # type: ignore[arg-type]


def with_weights(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[TrainingResult], TrainingResult]:
    return lambda done: replace(done, weights=change(done.weights))


@pytest.mark.parametrize("text", ROWS)
def test_equal_runs_are_equal(text: str) -> None:
    assert found(text, lambda done: done) == []


@pytest.mark.parametrize("text", ROWS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_outcome(losses=("nan", LOSSES[1])), "losses differ by inf"),
        (with_outcome(losses=(LOSSES[0], "nan")), "losses differ by inf"),
        (with_outcome(losses=("0x1.9p+2", LOSSES[1])), "losses differ by"),
        (with_outcome(grad_norms=("0x1.2p+0", "0x1.1p+0")), "norms differ by"),
        (with_outcome(grad_norms=("0x1p+0", "skipped")), "norms differ by inf"),
        (with_outcome(loss_scales=(1024.0, 512.0)), "loss scales"),
        (with_outcome(counted=("2 0x1p-10 0", "4 0x1p-10 1")), "samples, learning rates or skipped"),
        (lambda done: replace(done, weights=done.start), "weights|steps"),  # it has learned nothing
        (with_weights(lambda weights: weights | {"a": weights["a"] * math.nan}), "weights|steps"),
        (with_weights(lambda weights: {"b": weights["b"]}), "weights of a are on one side only"),
        (with_weights(lambda weights: weights | {"c": weights["a"]}), "weights of c are on one side only"),
    ],
)
def test_planted_differences_are_found(
    text: str, spoil: Callable[[TrainingResult], TrainingResult], message: str
) -> None:
    lines = found(text, spoil)
    assert any(part in line for line in lines for part in message.split("|")), lines


def test_states_of_the_optimizer_are_compared_where_bits_are_promised() -> None:
    assert any("states" in line for line in found("schedule=zb-h1", with_outcome(states=("other",))))
