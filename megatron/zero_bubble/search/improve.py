"""Local search: move a pass along the critical path past its neighbours, keep what shortens the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.zero_bubble.search.decode import Decoded, decode
from megatron.zero_bubble.search.dice import Dice
from megatron.zero_bubble.search.evaluate import evaluate
from megatron.zero_bubble.search.problem import NONE, Problem, Rows, W
from megatron.zero_bubble.search.timeline import times

_SLACK = 1e-6
_REACH = 8
"""How far along a block of the critical path a pass is moved."""
_MEAN_WEIGHT = 0.02
"""The mean over ranks guides the search where the longest rank stays as it is."""

Move = tuple[int, int, int]
"""Rank, from where, to where in its row of F and B."""


class Improved(NamedTuple):
    """The best cost, and the rows and the target of ``decode`` that give it."""

    cost: float
    target: float
    rows: Rows


def improve(problem: Problem, start: Improved, eagerness: float, tries: int, heat: float) -> Improved:
    """The best found from ``start`` by decoding rows ``tries`` times, each with the best cost so far as its target.

    Args:
        problem: what the rows are for.
        start: where to start.
        eagerness: of ``decode``.
        tries: how many rows may be decoded.
        heat: ms by which a move may worsen the schedule and still be kept, at first; it falls to 0.
    """

    def cost_of(rows: Rows, target: float) -> Decoded:
        return decode(problem, rows, eagerness, target)

    return _climb(problem, start, cost_of, False, tries, heat)


def refine(problem: Problem, start: Improved, tries: int, heat: float) -> Improved:
    """As ``improve``, but of rows with W's, which are moved as well; ``target`` means nothing here."""

    def cost_of(rows: Rows, _target: float) -> Decoded:
        return evaluate(problem, rows)

    return _climb(problem, start, cost_of, True, tries, heat)


def _climb(
    problem: Problem,
    start: Improved,
    cost_of: Callable[[Rows, float], Decoded],
    with_wgrads: bool,
    tries: int,
    heat: float,
) -> Improved:
    dice = Dice(0)
    best = start
    rows = [list(row) for row in start.rows]
    cost, mean, full = cost_of(rows, start.target)
    score, used = cost + _MEAN_WEIGHT * mean, 1
    while used < tries:
        moves = critical_moves(problem, full, dice, with_wgrads)
        dice.shuffle(moves)
        for rank, origin, to in moves[: tries - used]:
            row = rows[rank]
            row.insert(to, row.pop(origin))
            target = best.cost - _SLACK
            cost, mean, new = cost_of(rows, target)
            used += 1
            if cost + _MEAN_WEIGHT * mean < score + heat * (1 - used / tries) * dice.uniform() - _SLACK:
                score, full = cost + _MEAN_WEIGHT * mean, new
                if cost < best.cost - _SLACK:
                    best = Improved(cost, target, [list(r) for r in rows])
                break
            row.insert(origin, row.pop(to))
        else:
            if heat == 0 or not moves:
                break
    return best


def critical_moves(problem: Problem, full: Rows, dice: Dice, with_wgrads: bool) -> list[Move]:
    """Moves that break a longest path: per block on a rank, its last passes to the front, its first to the back.

    Places count W's only where these are moved as well.
    """
    starts, number, places = times(problem, full)
    rank_of, duration, source, hop, _, _ = problem.tables
    lateness = [s[-1] + duration[row[-1]] - o for s, row, o in zip(starts, full, problem.origin, strict=True)]
    longest = [r for r, late in enumerate(lateness) if late > max(lateness) - _SLACK]
    rank = longest[dice.below(len(longest))]
    place = len(full[rank]) - 1
    block, moves = [place], []
    while True:
        code, start = full[rank][place], starts[rank][place]
        before, arrival = source[code], -1.0
        if before != NONE:
            other = rank_of[before]
            other_place = places[before][number[rank][place]]
            arrival = starts[other][other_place] + duration[before] + hop[code]
        follows = place > 0 and starts[rank][place - 1] + duration[full[rank][place - 1]] > start - _SLACK
        arrives = arrival > start - _SLACK
        if follows and not (arrives and dice.uniform() < 0.5):
            place -= 1
            block.append(place)
            continue
        moves += _moves_in(full[rank], rank, block, with_wgrads)
        if not arrives:
            return moves
        rank, place = other, other_place
        block = [place]


def _moves_in(row: list[int], rank: int, block: list[int], with_wgrads: bool) -> list[Move]:
    """The moves of a block, its places given last to first."""
    codes = [row[place] for place in reversed(block) if with_wgrads or row[place] % 3 != W]
    if len(codes) < 2:
        return []
    first = sum([with_wgrads or code % 3 != W for code in row[: block[-1]]])
    last = len(codes) - 1
    moves = []
    for end in (last, last - 1):
        for to in range(end - 1, max(-1, end - _REACH), -1):
            if codes[to] == codes[end]:
                break
            moves.append((rank, first + end, first + to))
    for to in range(1, min(len(codes), _REACH)):
        if codes[to] == codes[0]:
            break
        moves.append((rank, first, first + to))
    return moves
