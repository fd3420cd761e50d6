"""Backwards that run alone in a schedule with pairs, or without: fused, or split into B and W.

A fused BW that runs alone hides the all-to-all of its B beneath its own weight gradients; a split backward lets the
previous rank continue earlier. Which of the two is shorter depends on the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.core.ir import Kind, Pass, Schedule
from megatron.zero_bubble.core.ir.passes import groups


def split_alone(schedule: Schedule) -> Schedule:
    """Split every BW outside a pair into a B and the W that directly follows it."""
    return replace(schedule, order=tuple(tuple(_split(row, schedule)) for row in schedule.order))


def fuse_alone(schedule: Schedule) -> Schedule:
    """Fuse every B outside a pair with its W, if that directly follows it."""
    return replace(schedule, order=tuple(tuple(_fused(row)) for row in schedule.order))


def _split(row: Sequence[Pass], schedule: Schedule) -> Iterator[Pass]:
    for works in groups(row, schedule.pairs):
        if len(works) == 1 and works[0].kind is Kind.BW:
            yield from (works[0]._replace(kind=kind) for kind in (Kind.B, Kind.W))
        else:
            yield from works


def _fused(row: Sequence[Pass]) -> Iterator[Pass]:
    passes = iter([*row, None])
    p = next(passes)
    while p is not None:
        following = next(passes)
        if p.kind is Kind.B and following == p._replace(kind=Kind.W):
            p, following = p._replace(kind=Kind.BW), next(passes)
        yield p
        p = following
