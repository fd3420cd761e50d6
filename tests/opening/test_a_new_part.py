"""A part of a pipeline, defined outside the package: an op, its lowering pass, its handler, and what it keeps.

The op notes that a pass has run. The part counts these notes, and checks that every forward gets its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from megatron.zero_bubble import Kind, Pass, Schedule, build
from megatron.zero_bubble.core.ir import Compute, Op, Plan
from megatron.zero_bubble.engine.runtime.executor import Handler
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.adapter.prepared import Lowering
from tests.helpers.parity import Layout, Outcome, assert_same_bits, assert_same_model, train
from tests.helpers.ranks import RankPool

STEPS, EVALUATIONS, MICROBATCHES = 5, 1, 4


@dataclass(frozen=True, slots=True)
class Note(Op):
    """Note that a pass has run; it needs nothing and takes no time."""

    work: Pass

    def __str__(self) -> str:
        return f"note({self.work})"


def note(plan: Plan) -> Plan:
    """Lowering pass: note every pass."""
    return replace(plan, ops=tuple(tuple(_noted(row)) for row in plan.ops))


def _noted(row: Sequence[Op]) -> Iterator[Op]:
    for op in row:
        yield op
        if isinstance(op, Compute):
            yield Note(op.work)


class PassCounter(Part):
    """Counts the passes of training iterations by kind."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._without_backward: set[tuple[int, int]] = set()

    def lowering(self, schedule: Schedule, forward_only: bool) -> Lowering | None:
        return None if forward_only else Lowering(note, ("every pass",))

    def connect(self, to: Joined) -> None:
        self.calls["connect"] += 1

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        self.calls["evaluation" if iteration.forward_only else "training"] += 1
        yield

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], Handler]:
        return {Note: self._note}

    def _note(self, op: Note, _inputs: Sequence[Any]) -> None:
        self.passes[op.work.kind.value] += 1
        of = op.work.stage, op.work.microbatch
        if op.work.kind is Kind.F:
            self._without_backward.add(of)
        elif op.work.kind in (Kind.B, Kind.BW):
            self._without_backward.remove(of)

    @property
    def num_pending(self) -> int:
        return len(self._without_backward)

    def close(self) -> None:
        self.calls["close"] += 1


def train_counting(rank: int, flags: str, schedules: Sequence[str | None]) -> tuple[list[Outcome], Any, Any]:
    """Train with the part in the pipeline; return the outcomes and what the part has counted."""
    from megatron.zero_bubble.integration import patching

    counter = PassCounter()
    with mock.patch.object(patching, "apply", partial(patching.apply, parts=[counter])):
        outcomes = train(rank, flags, schedules)
    return outcomes, dict(counter.passes), dict(counter.calls)


def test_what_a_part_keeps_is_pending() -> None:
    counter = PassCounter()
    pipeline = Pipeline(lambda ranks, count: build("zb-h1", num_ranks=ranks, num_microbatches=count), [counter])
    assert pipeline.part(PassCounter) is counter and pipeline.num_pending == 0
    counter._note(Note(Pass(0, Kind.F, 0)), ())
    assert pipeline.num_pending == 1


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb-h1", "--clip-grad 100 --zero-bubble-post-validation"),
        pytest.param("zb-v", "--zero-bubble-offload all", marks=pytest.mark.full),
    ],
)
def test_part_runs_its_ops_beside_those_of_other_parts(ranks: RankPool, schedule: str, options: str) -> None:
    """The bits stay those of stock, and what the part keeps counts as pending, so nothing may be left of it."""
    layout, schedules = Layout(2, num_layers=4), [None, schedule]
    ran = ranks.run(2, train_counting, layout.flags(MICROBATCHES, options), schedules, timeout=120)
    outcomes = [of_rank for of_rank, _, _ in ran]
    if schedule == "zb-v":
        assert_same_model(outcomes, schedules, layout)
    else:
        assert_same_bits(outcomes, schedules)
    chunks = 2 if schedule == "zb-v" else 1
    for _, passes, calls in ran:
        assert passes == dict.fromkeys(("F", "B", "W"), STEPS * MICROBATCHES * chunks)
        assert calls == {"connect": 2, "training": STEPS, "evaluation": EVALUATIONS, "close": 1}
