"""Tests of what is looked behind where options refuse changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megatron.zero_bubble.core.errors import Remedy
from megatron.zero_bubble.planning.remedies import remedied
from megatron.zero_bubble.planning.score import DroppedVariant
from megatron.zero_bubble.planning.worth import Advice

GRAPHS, STASH = Remedy(drops=("--graphs",)), Remedy(adds=("--stash", "off"))
NONE: Any = Advice(SimpleNamespace(), (), "makespan", 0.01)  # type: ignore[arg-type]


def test_the_reason_that_refuses_most_and_has_a_remedy_is_looked_behind() -> None:
    """And then the reason behind it, with both remedies."""
    dropped = (
        *(DroppedVariant(name, "no layers") for name in "xyz"),
        DroppedVariant("a", "other", STASH),
        *(DroppedVariant(name, "graphs", GRAPHS) for name in "bc"),
    )
    row: Any = SimpleNamespace(fits=True, gain=0.5, ms=1.0, change=SimpleNamespace(effort=(0, 1)))
    asked: list[tuple[Remedy, set[str]]] = []

    def ask(remedy: Remedy, names: Collection[str]) -> Advice:
        asked.append((remedy, set(names)))
        if len(asked) == 1:
            return replace(NONE, dropped=(DroppedVariant("b", "stash", STASH), DroppedVariant("c", "no layers")))
        return replace(NONE, rows=(row,))

    found, both = remedied(replace(NONE, dropped=dropped), ask), Remedy(STASH.adds, GRAPHS.drops)
    assert found is not None and found[:3] == ("graphs", 2, both) and found.advice.best is row
    assert asked == [(GRAPHS, {"b", "c"}), (both, {"b"})]


def test_without_a_remedy_or_a_gain_there_is_none() -> None:
    def ask(*_: Any) -> Advice:
        return NONE

    assert remedied(replace(NONE, dropped=(DroppedVariant("a", "no layers"),)), ask) is None
    found = remedied(replace(NONE, dropped=(DroppedVariant("a", "graphs", GRAPHS),)), ask)
    assert found is not None and found.advice.best is None
