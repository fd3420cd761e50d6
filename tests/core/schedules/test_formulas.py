"""Tests of the formulas of ``zero-bubble list`` and the README: they are what the simulator finds."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Slices, build, simulate
from megatron.zero_bubble.core.schedules import SCHEDULES

EQUAL, DIFFERENT = (1.0, 1.0, 1.0), (10.0, 11.0, 8.0)
FOR_EQUAL_PASSES = {name for name, recipe in SCHEDULES.items() if recipe.adapts or recipe.has_units}
ROUGH = "~"
"""Precedes formulas that are off by up to half of a microbatch's time or memory."""


def value(formula: str, **symbols: float) -> float:
    """Evaluate a formula in which products have no sign, such as 2(p-1)M/v."""
    product = re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", formula.partition(" (")[0].lstrip("~<"))
    return float(eval(product, {"__builtins__": {}}, symbols))  # noqa: S307


@pytest.mark.parametrize("times", [EQUAL, DIFFERENT], ids=["equal passes", "different passes"])
@pytest.mark.parametrize("p", [8, pytest.param(14, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_and_memory_are_those_of_the_formulas(name: str, p: int, times: tuple[float, float, float]) -> None:
    recipe, m = SCHEDULES[name], 6 * p
    if times != EQUAL and (name in FOR_EQUAL_PASSES or "=" in recipe.bubble):
        return
    for v in (2, 3) if recipe.shape == "interleaved" else (recipe.num_chunks(None),):
        slices = Slices.even(p) if recipe.sliced else None
        chunks = v if recipe.shape == "interleaved" else None
        schedule = build(name, num_ranks=p, num_microbatches=m, num_chunks=chunks, num_slices=slices)
        on = schedule.placement
        drawn = simulate(schedule, PassCosts.uniform(on, *times), PassMemory.uniform(on))
        symbols = dict(zip("FBW", times, strict=True)) | {
            "p": p,
            "v": v,
            "m": m,
            "M": 1,
            "n": schedule.num_slices,
            "U": p,
        }
        bubble, peak = drawn.span_ms - m * sum(times), max(drawn.peak_activation)
        promised, kept = value(recipe.bubble, **symbols), value(recipe.memory, **symbols)
        if recipe.bubble.startswith("<"):
            assert bubble < promised
        else:
            assert bubble == pytest.approx(promised, abs=sum(times) / 2 if recipe.bubble.startswith(ROUGH) else 1e-6)
        assert peak == pytest.approx(kept, abs=0.5 if recipe.memory.startswith(ROUGH) else 1e-6)
