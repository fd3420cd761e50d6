"""The schedules of a name, and those with which a search begins."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.ir import Slices
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided
from megatron.zero_bubble.planning.setup import Cuts, Messages, Named, Searched, Setup
from megatron.zero_bubble.planning.source import ScheduleSource


def named(
    name: str, num_ranks: int, stages: int | None = None, vocabulary: Algorithm | None = None, **more: Any
) -> ScheduleSource:
    """The schedules of a name; ``more`` are fields of ``Setup``."""
    return ScheduleSource.of(Setup(Named(name, stages), vocabulary=divided(vocabulary), **more), num_ranks)


def begun(
    placement: Any,
    num_ranks: int,
    slices: Slices | None = None,
    fused: bool = False,
    vocabulary: Algorithm | None = None,
    receives: Any = "early",
    **order: Any,
) -> ScheduleSource:
    """The schedules with which a search begins; ``order`` are fields of ``Searched``."""
    setup = Setup(
        Searched(placement, **order), cuts=cuts(slices), vocabulary=divided(vocabulary), messages=Messages(receives)
    )
    return ScheduleSource.of(setup, num_ranks, fused=fused)


def divided(algorithm: Algorithm | None) -> Divided | None:
    return None if algorithm is None else Divided(algorithm)


def cuts(slices: Slices | None) -> Cuts | None:
    """Those of a job, in 1,000 tokens if they are not even."""
    if slices is None or len(slices) == 1:
        return None
    return Cuts(len(slices), "even") if slices.are_even else Cuts(None, slices.in_tokens(1000))
