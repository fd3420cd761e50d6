"""What must be equal to what in a row, as ``docs/exactness.md`` promises it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.zero_bubble import SCHEDULES
from pair_matrix.jobs import layout_of, microbatches_of
from pair_matrix.options import Row, value_of
from pair_matrix.train import TrainingResult

TOLERANCES = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}
"""Relative differences of losses and gradient norms between the default mode and stock (``docs/exactness.md``)."""
STEPS = {"fp32": 0.05, "fp16": 0.3, "bf16": 0.3}
"""Differences of the steps of all weights, relative to their norm: at most 0.018, 0.15 and 0.024 in the first 70 rows.
Adam divides a gradient by its own size, so a rounding error of one that is nearly 0 may be a whole step."""
_VOCABULARY = "embedding.word_embeddings.weight", "output_layer.weight"
_ROUNDING = 1e-6
"""Of a norm whose parts are added in another order."""
_INVERSE = 1e-3
"""Of a norm after an Adam update was inverted."""
_AUXILIARY_LOSS, _AUXILIARY_STEPS = 5e-3, 0.3
"""Of a gradient with auxiliary losses per slice, and of the steps, which were at most 0.17 apart."""
Results = Sequence[Mapping[str, TrainingResult]]


class Promise(NamedTuple):
    """How equal two runs are.

    Attributes:
        kind: ``bits``; ``model``: bits of losses and weights, on whatever rank they are, and norms up to rounding;
            ``tolerance``; or ``none``, where samples are in other microbatches.
        losses, norms: relative differences; 0 where bits are promised.
        steps: how far the steps of all weights may be apart, relative to their norm; 0 where bits are promised.
    """

    kind: str
    losses: float = 0.0
    norms: float = 0.0
    steps: float = 0.0


def promise_to_stock(row: Row, results: Results) -> Promise:
    """How equal the schedule is to stock 1F1B."""
    if row["samples"] == "balanced":
        return Promise("none")
    tolerance, steps = TOLERANCES[row["dtype"]], STEPS[row["dtype"]]
    routed_again = row["recompute"] in ("full", "block")  # then the loss is that of slices (docs/slices.md)
    if is_sliced(row) and row["experts"] == "auxiliary-loss" and routed_again:
        tolerance, steps = max(tolerance, _AUXILIARY_LOSS), max(steps, _AUXILIARY_STEPS)
    rounded = Promise("tolerance", tolerance, tolerance, steps)
    sums_of_units = row["shards"] not in ("off", "one-unit", "of-plans") and microbatches_of(row) > 1
    if row["wgrad"] == "fused" or row["vocabulary"] != "whole" or is_sliced(row) or sums_of_units:
        return rounded
    if _is_in_place(row):
        return Promise("bits")
    if _is_clipped(row, results):
        return rounded
    return Promise("model", 0.0, _ROUNDING)


def promise_to_schedule(row: Row) -> Promise:
    """How equal the variant is to the schedule without post-validation, offloading and late receives."""
    if row["step"] == "ahead-inverse":
        tolerance = max(_INVERSE, TOLERANCES[row["dtype"]])
        return Promise("tolerance", tolerance, tolerance, STEPS[row["dtype"]])
    return Promise("bits")


def is_sliced(row: Row) -> bool:
    """Whether sequences are cut."""
    recipe = SCHEDULES.get(row["schedule"])
    return row["slices"] != "default" or (recipe is not None and recipe.sliced)


def _is_in_place(row: Row) -> bool:
    """Whether every layer is on the same rank as in stock, so that norms are the same sums."""
    name = row["schedule"]
    linear = name == "zb-auto" or (name in SCHEDULES and SCHEDULES[name].shape == "linear")
    return linear and row["layers"] == "even"


def _is_clipped(row: Row, results: Results) -> bool:
    """Whether a step of stock was clipped: by a norm that is a sum in another order on a V."""
    limit = float(value_of(row, "clip").job.split()[-1])
    norms = [norm for result in results for norm in _numbers(result["stock"].outcome.grad_norms)]
    return limit > 0 and any(norm >= limit * (1 - 1e-3) for norm in norms)


def differences(row: Row, results: Results) -> list[str]:
    """What is not as promised, one line each; an empty list if the row passes."""
    found = [*_unmoved(row, results), *_between("schedule", "stock", promise_to_stock(row, results), row, results)]
    if "variant" in results[0]:
        found += _between("variant", "schedule", promise_to_schedule(row), row, results)
    return found


def _unmoved(row: Row, results: Results) -> list[str]:
    """Parameters whose gradients could be lost without a trace; in 16 bits, a small step may be rounded away."""
    if row["dtype"] != "fp32":
        return []
    names = {name for result in results for name in result["stock"].outcome.unmoved}
    return [f"stock did not change {', '.join(sorted(names))}"] if names else []


def _between(own: str, other: str, promise: Promise, row: Row, results: Results) -> list[str]:
    if promise.kind == "none":
        return []
    lines: dict[str, str] = {}
    left_out = _VOCABULARY if row["vocabulary"] != "whole" else ()
    for rank, result in enumerate(results):
        lines |= dict.fromkeys(_of_rank(result[own], result[other], promise), f"rank {rank}")
    size = layout_of(row).num_ranks // layout_of(row).pipeline
    for first in range(size):
        pipeline = results[first::size]
        ours, theirs = (_merged(pipeline, mode, left_out) for mode in (own, other))
        for line in _weights(ours, theirs, pipeline[0][other].start, promise):
            lines[line] = f"pipeline {first}"
    return [f"{own} against {other}, {where}: {line}" for line, where in lines.items()]


def _of_rank(own: TrainingResult, other: TrainingResult, promise: Promise) -> list[str]:
    a, b = own.outcome, other.outcome
    found = []
    if a.counted != b.counted:
        found.append(f"samples, learning rates or skipped iterations {a.counted} and {b.counted}")
    if a.loss_scales != b.loss_scales:
        found.append(f"loss scales {a.loss_scales} and {b.loss_scales}")
    pairs = (("losses", a.losses, b.losses, promise.losses), ("norms", a.grad_norms, b.grad_norms, promise.norms))
    for what, ours, theirs, tolerance in pairs:
        if tolerance == 0.0:
            if ours != theirs:
                found.append(f"{what} differ by {_largest(ours, theirs):.1e}, bits were promised")
        elif not (largest := _largest(ours, theirs)) <= tolerance:
            found.append(f"{what} differ by {largest:.1e}, {tolerance:.0e} was promised")
    if promise.kind == "bits" and a.states != b.states:
        found.append("states of the optimizer differ, bits were promised")
    return found


def _merged(results: Results, mode: str, left_out: Sequence[str]) -> dict[str, torch.Tensor]:
    """The weights of a pipeline; those of a divided vocabulary are shards, and are left out."""
    weights = (item for result in results for item in result[mode].weights.items())
    return {name: weight for name, weight in weights if name not in left_out}


def _weights(
    own: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    promise: Promise,
) -> list[str]:
    """Compare the weights of a pipeline: bits, or how far the steps have moved them from ``start``."""
    if own.keys() != other.keys():
        return [f"weights of {', '.join(sorted(own.keys() ^ other.keys()))} are on one side only"]
    if promise.kind == "tolerance":
        apart = _moved_apart(own, other, start)
        return [] if apart <= promise.steps else [f"steps are {apart:.1e} of their norm apart"]
    different = [name for name in other if not torch.equal(own[name], other[name])]
    return [f"weights differ, bits were promised: {', '.join(different)}"] if different else []


def _moved_apart(
    own: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
) -> float:
    """The norm of the difference of all steps, relative to the norm of those of ``other``."""
    apart = math.fsum(float((own[name] - other[name]).double().norm()) ** 2 for name in other)
    moved = math.fsum(float((other[name] - start[name]).double().norm()) ** 2 for name in other)
    if not apart:
        return 0.0
    return math.sqrt(apart / moved) if moved and math.isfinite(apart) else math.inf


def _numbers(texts: Sequence[str]) -> list[float]:
    """Hexadecimal numbers, which may follow words; skipped steps have none."""
    words = (text.split()[-1] for text in texts)
    return [float.fromhex(word) for word in words if word not in ("skipped", "None")]


def _largest(own: Sequence[str], other: Sequence[str]) -> float:
    """The largest relative difference; infinite if one side skipped other steps."""
    skipped = [[text.split()[-1] in ("skipped", "None") for text in side] for side in (own, other)]
    if skipped[0] != skipped[1]:
        return float("inf")
    pairs = zip(_numbers(own), _numbers(other), strict=True)
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _relative(own: float, other: float) -> float:
    """The relative difference; infinite unless both are finite or the same."""
    if own == other or (math.isnan(own) and math.isnan(other)):
        return 0.0
    apart = abs(own - other) / max(abs(other), 1e-30)
    return apart if math.isfinite(apart) else math.inf
