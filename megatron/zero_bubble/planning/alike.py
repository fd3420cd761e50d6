"""Divide samples among replicas of which several share experts, and so run their microbatches at the same time.

These exchange tokens in every layer, forward and backward. So they run equally many microbatches, in one order, and
every one takes as long as the longest that runs with it. Of the replicas that do not share experts, none waits for
another before the end of an iteration, and they may run different numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load
from megatron.zero_bubble.planning.ordering import Simulator
from megatron.zero_bubble.planning.packing import Microbatches, karmarkar_karp, load_of, pack

_MORE, _MUCH = 1.25, 1.05

Row = tuple[tuple[int, ...], ...]
"""The microbatches that replicas run at the same time, the longest first."""


def alike(
    lengths: Sequence[int], groups: int, members: int, ranks: int, most_tokens: int, simulator: Simulator
) -> tuple[Microbatches, ...]:
    """The microbatches of every replica, those of a group one after the other; see ``balance.balance``.

    Args:
        members: replicas of a group, which share experts; samples are a multiple of them.
    """
    cost = simulator.cost
    costs = [cost.sample(tokens) for tokens in lengths]
    # The longest sample of a group also fills and drains its pipelines.
    longest = sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))[:groups]
    drained = [own * ranks if sample in longest else own for sample, own in enumerate(costs)]
    candidates = [
        [
            _rows(part, lengths, members, ranks, cost, most_tokens)
            for part in _multiples(karmarkar_karp(work, groups), work, members)
        ]
        for work in (costs, drained)
    ]
    found = min(candidates, key=lambda parts: max(_duration(rows, lengths, ranks, cost) for rows in parts))
    return tuple(own for rows in found for own in _dealt(rows, lengths, members, simulator))


def _multiples(parts: Sequence[Sequence[int]], costs: Sequence[float], members: int) -> list[list[int]]:
    """Move the shortest samples, until every group has a sample or more for each member, and equally many for each."""
    found = [sorted(part, key=lambda sample: costs[sample], reverse=True) for part in parts]
    moved = sorted((part.pop() for part in found for _ in range(len(part) % members)), key=lambda own: costs[own])
    while moved or not all(found):
        if not moved:
            fullest = max(found, key=len)
            moved = [fullest.pop() for _ in range(members)]
        least = min(found, key=lambda part: (bool(part), sum(costs[sample] for sample in part)))
        least += [moved.pop() for _ in range(members)]
        least.sort(key=lambda sample: costs[sample], reverse=True)
    return [sorted(part) for part in found]


def _rows(
    samples: Sequence[int], lengths: Sequence[int], members: int, ranks: int, cost: LengthCost, most_tokens: int
) -> list[Row]:
    """The microbatches of a group; several numbers are tried, as in ``balance.microbatches``."""
    number = _up(-(-sum(lengths[sample] for sample in samples) // most_tokens), members)
    best: list[Row] = []
    least = inf
    while True:
        packed = pack(samples, lengths, cost, most_tokens, number)
        rows = [] if packed is None else _sorted(packed, lengths, members, cost)
        time = _duration(rows, lengths, ranks, cost) if rows else inf
        if rows and time <= least * (1 + ROUNDING):
            best, least = rows, min(time, least)
        if best and (number == len(samples) or time > least * _MUCH):
            return best
        number = min(max(number + members, _up(int(number * _MORE), members)), len(samples))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sorted(packed: Microbatches, lengths: Sequence[int], members: int, cost: LengthCost) -> list[Row]:
    """Rows of microbatches of like times, the longest first."""
    times = {own: cost.microbatch(load_of(own, lengths)) for own in packed}
    own = sorted(packed, key=lambda microbatch: (-times[microbatch], microbatch))
    return [tuple(own[first : first + members]) for first in range(0, len(own), members)]


def _longest(row: Row, lengths: Sequence[int]) -> Load:
    return load_of(row[0], lengths)


def _duration(rows: Sequence[Row], lengths: Sequence[int], ranks: int, cost: LengthCost) -> float:
    """Estimate the time of a group: its rows in turn, and the longest once more for every other rank."""
    times = [cost.microbatch(_longest(row, lengths)) for row in rows]
    return sum(times) + (ranks - 1) * max(times)


def _dealt(
    rows: Sequence[Row], lengths: Sequence[int], members: int, simulator: Simulator
) -> list[tuple[tuple[int, ...], ...]]:
    """The microbatches of every member, in the best order of the rows; the longest goes to each in turn."""
    rows = sorted(rows)
    _, order = simulator.best([_longest(row, lengths) for row in rows])
    return [tuple(rows[at][(member + turn) % members] for turn, at in enumerate(order)) for member in range(members)]
