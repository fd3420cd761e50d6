"""Improve an order of pairs by single moves: another place for an op, a pair joined or separated, a W apart or fused.

Moves begin at ops of the longest path, because no other move makes an order shorter. One that makes it slightly longer
is kept too, less and less so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.pairs import can_pair
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.core.search.dice import Dice
from megatron.zero_bubble.core.search.pair_tables import PairTables, Row, Step, at, length_of, peak

_NEAR, _FAR = 6, 48
"""Places by which an op, and a W, moves at most."""
_HEAT = 2e-3
"""The share of its length by which an order may become longer at first."""


def improved(
    tables: PairTables, rows: Sequence[Row], limit: float, objective: Metric, tries: int, seed: int = 1
) -> tuple[float, list[Row]]:
    """Return the shortest rows that so many tries find, and their length; they are within the limit if ``rows`` are."""
    dice = Dice(seed)
    now = best = list(rows)
    now_ms = best_ms = length_of(tables, now, objective)
    path = critical(tables, now)
    for number in range(tries):
        rank, place = path[dice.below(len(path))]
        row = _moved(tables, now[rank], place, dice)
        if row is None or not in_order(tables, row) or peak(row) > limit:
            continue
        trial = [*now[:rank], row, *now[rank + 1 :]]
        ms = length_of(tables, trial, objective)
        if ms <= now_ms * (1 + _HEAT * (1 - number / tries) * dice.uniform()) or ms < best_ms:
            now, now_ms, path = trial, ms, critical(tables, trial)
            if ms < best_ms:
                best, best_ms = now, ms
    return best_ms, best


def _moved(tables: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """A row with one move at a place; None if the move that is drawn does not suit the op there."""
    move = _MOVES[dice.below(len(_MOVES))]
    return move(tables, row, place, dice)


Move = Callable[[PairTables, Row, int, Dice], Row | None]


def _shift(_: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """Move an op to a near place."""
    other = place + dice.below(2 * _NEAR + 1) - _NEAR
    if other == place or not 0 <= other < len(row):
        return None
    own = [*row[:place], *row[place + 1 :]]
    own.insert(other, row[place])
    return own


def _separate(tables: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """Run the two passes of a pair one after the other."""
    works = row[place].works
    if len(works) < 2:
        return None
    parts = [tables.step((p,)) for p in (works if dice.below(2) else reversed(works))]
    return [*row[:place], *parts, *row[place + 1 :]]


def _join(tables: PairTables, row: Row, place: int, _: Dice) -> Row | None:
    """Pair an op with the nearest one that it can run with."""
    works = row[place].works
    if len(works) > 1 or works[0].kind is W:
        return None
    for other in _around(place, len(row)):
        partner = row[other].works
        if len(partner) > 1:
            continue
        one, two = (works[0], partner[0]) if works[0].kind is F else (partner[0], works[0])
        if can_pair(one, two):
            joined = tables.step((one, two))
            return [joined if at_ == place else each for at_, each in enumerate(row) if at_ != other]
    return None


def _exchange(tables: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """Exchange the forwards, or the backwards, of two neighbouring ops."""
    if place + 1 >= len(row):
        return None
    one, two = row[place].works, row[place + 1].works
    if len(one) < 2 or len(two) < 2:
        return None
    ends = (0, 1)[dice.below(2)]
    pairs = [(two[0], one[1]), (one[0], two[1])] if ends == 0 else [(one[0], two[1]), (two[0], one[1])]
    if not all(can_pair(*each) for each in pairs):
        return None
    return [*row[:place], *map(tables.step, pairs), *row[place + 2 :]]


def _delay(tables: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """Run a W later, and with it those of its stage before that place; fused ones are split."""
    stage, kind = row[place].works[-1][:2]
    if kind not in (BW, W):
        return None
    target = min(len(row), place + 1 + dice.below(_FAR))
    own, late = row[:place], []
    for step in row[place:target]:
        last = step.works[-1]
        if last.stage != stage or last.kind not in (BW, W):
            own.append(step)
            continue
        late.append(tables.step((last._replace(kind=W),)))
        if last.kind is BW:
            own.append(tables.step((*step.works[:-1], last._replace(kind=B))))
    return [*own, *late, *row[target:]]


def _advance(_: PairTables, row: Row, place: int, dice: Dice) -> Row | None:
    """Run a W earlier, and with it those of its stage after that place."""
    stage, kind = row[place].works[-1][:2]
    if kind is not W:
        return None
    target = max(0, place - 1 - dice.below(_FAR))
    between = row[target : place + 1]
    early = [step for step in between if step.works[-1].stage == stage and step.works[-1].kind is W]
    return [*row[:target], *early, *(step for step in between if step not in early), *row[place + 1 :]]


def _fuse(tables: PairTables, row: Row, place: int, _: Dice) -> Row | None:
    """Fuse a W, or a B, with its other half."""
    last = row[place].works[-1]
    if last.kind not in (B, W):
        return None
    backward, weight = last._replace(kind=B), last._replace(kind=W)
    own = [step for step in row if step.works != (weight,)]
    at_ = next(number for number, step in enumerate(own) if step.works[-1] == backward)
    own[at_] = tables.step((*own[at_].works[:-1], last._replace(kind=BW)))
    return own


_MOVES: tuple[Move, ...] = (_shift, _shift, _separate, _join, _exchange, _delay, _fuse, _advance)


def _around(place: int, size: int) -> Iterator[int]:
    """The near places, the nearest first, later ones before earlier ones."""
    for by in range(1, _NEAR + 1):
        yield from (other for other in (place + by, place - by) if 0 <= other < size)


def in_order(tables: PairTables, row: Sequence[Step]) -> bool:
    """Whether a row is one that a model can run: on every stage, the forwards, the backwards and the weight gradients
    are each in the order of the microbatches, and those of a microbatch one after the other.
    """
    stages = tables.placement.num_stages
    forwards, backwards, weights = [0] * stages, [0] * stages, [0] * stages
    for step in row:
        for stage, kind, microbatch, _ in step.works:
            if kind is F:
                if forwards[stage] != microbatch:
                    return False
                forwards[stage] += 1
                continue
            if kind is not W:
                if backwards[stage] != microbatch or forwards[stage] <= microbatch:
                    return False
                backwards[stage] += 1
            if kind is not B:
                if weights[stage] != microbatch or backwards[stage] <= microbatch:
                    return False
                weights[stage] += 1
    return True


def critical(tables: PairTables, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """The ops of the longest path through an order, as rank and place; the last one first."""
    made: dict[int, tuple[float, int, int]] = {}
    before: list[list[tuple[int, int] | None]] = [[] for _ in rows]
    states = [(0.0, 0.0, 0.0)] * len(rows)
    waiting: dict[int, int] = {}
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        row = rows[rank]
        while (place := len(before[rank])) < len(row):
            step = row[place]
            if (missing := next((need for need, _ in step.needs if need not in made), None)) is not None:
                waiting[missing] = rank
                break
            computed, sent, ready = states[rank]
            source = (rank, place - 1) if place else None
            for need, hop in step.needs:
                there, *of = made[need]
                if there + hop > ready:
                    ready, source = there + hop, (of[0], of[1])
            issued_late = at(step.computed, computed, sent, -math.inf) < step.computed[2] + ready
            before[rank].append(source if issued_late or not place else (rank, place - 1))
            for output, end in zip(step.makes, step.ends, strict=False):
                made[output] = at(end, computed, sent, ready), rank, place
                if output in waiting:
                    todo.append(waiting.pop(output))
            states[rank] = at(step.computed, computed, sent, ready), at(step.sent, computed, sent, ready), ready
    last = max(range(len(rows)), key=lambda rank: max(states[rank][:2]))
    found: list[tuple[int, int]] = []
    on: tuple[int, int] | None = (last, len(rows[last]) - 1)
    while on is not None and on[1] >= 0:
        found.append(on)
        on = before[on[0]][on[1]]
    return found
