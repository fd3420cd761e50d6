"""Local search: move passes on the critical path past their neighbours, and keep moves that shorten the schedule.

A fused backward moves as a whole; whether it still has to be fused where it goes follows from the memory there.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.core.search.dice import Dice
from megatron.zero_bubble.core.search.evaluate import INFEASIBLE, evaluate
from megatron.zero_bubble.core.search.problem import NONE, Problem, Rows
from megatron.zero_bubble.core.search.rows import times

_SLACK = 1e-6
_REACH = 8
"""Largest distance by which a pass is moved within a block of the critical path."""
_MEAN_WEIGHT = 0.02
"""Weight of the mean over ranks, which guides the search among moves that do not change the longest rank."""

Relocation = tuple[int, int, int, int]
"""A rank, the old and the new place of passes in its row, and their number: 2 for a fused backward, else 1. They go
before the pass at the new place if that is further to the front, else behind it.
"""


def refine(problem: Problem, rows: Rows, tries: int, heat: float, seed: int) -> tuple[float, Rows]:
    """Return the best cost found by ``tries`` evaluations, and its rows.

    Args:
        problem: the problem of the rows.
        rows: the rows to start from; infeasible rows are returned unchanged.
        tries: the largest number of evaluations.
        heat: ms by which a move may lengthen the schedule and still be kept; this falls to 0 during the search.
        seed: seed of the random order of moves.
    """
    dice = Dice(seed)
    rows = [list(row) for row in rows]
    cost, mean = evaluate(problem, rows)
    best_cost, best, score, used = cost, [list(row) for row in rows], cost + _MEAN_WEIGHT * mean, 1
    while used < tries and best_cost < INFEASIBLE:
        moves = critical_moves(problem, rows, dice)
        dice.shuffle(moves)
        for rank, origin, to, size in moves[: tries - used]:
            row = rows[rank]
            _shift(row, origin, to, size)
            cost, mean = evaluate(problem, rows)
            used += 1
            warmth = heat * (1.0 - used / tries)
            if cost + _MEAN_WEIGHT * mean < score + warmth * dice.uniform() - _SLACK:
                score = cost + _MEAN_WEIGHT * mean
                if cost < best_cost - _SLACK:
                    best_cost, best = cost, [list(r) for r in rows]
                break
            _shift(row, *((to, origin + size - 1) if to < origin else (to - size + 1, origin)), size)
        else:
            if heat == 0 or not moves:
                break
    return best_cost, best


def _shift(row: list[int], origin: int, to: int, size: int) -> None:
    passes = row[origin : origin + size]
    del row[origin : origin + size]
    at = to if to < origin else to - size + 1
    row[at:at] = passes


def critical_moves(problem: Problem, rows: Rows, dice: Dice) -> list[Relocation]:
    """Return moves that break a longest path: in each block on a rank, of its last passes to the front and of its first
    pass to the back.
    """
    fused = problem.fused(rows)
    assert fused is not None, "moves start from feasible rows"
    starts, number, places = times(problem, rows, fused)
    tables = problem.tables
    rank_of, duration, source, hop = tables.rank, tables.duration, tables.source, tables.hop
    lateness = [s[-1] + duration[row[-1]] - o for s, row, o in zip(starts, rows, problem.origin, strict=True)]
    longest = [r for r, late in enumerate(lateness) if late >= max(lateness) - _SLACK]
    rank = longest[dice.below(len(longest))]
    place = last = len(rows[rank]) - 1
    moves: list[Relocation] = []
    while True:
        if place and fused[rank][place - 1]:
            place -= 1
            continue
        code, start = rows[rank][place], starts[rank][place]
        before, arrival = source[code], -1.0
        if before != NONE:
            other = rank_of[before]
            other_place = places[before][number[rank][place]]
            is_fused = fused[other][other_place]
            end = starts[other][other_place] + duration[before] + (duration[before + 1] if is_fused else 0.0)
            arrival = end + hop[code]
        follows = place > 0 and starts[rank][place - 1] + duration[rows[rank][place - 1]] >= start - _SLACK
        arrives = arrival >= start - _SLACK
        if follows and not (arrives and dice.uniform() < 0.5):
            place -= 1
            continue
        moves += _moves_in(rows[rank], fused[rank], rank, place, last)
        if not arrives:
            return moves
        rank, place = other, other_place
        last = place + is_fused


def _moves_in(row: list[int], fused: Sequence[int], rank: int, first: int, last: int) -> list[Relocation]:
    """Return the moves of the block from place ``first`` to place ``last``."""
    moves: list[Relocation] = []
    if first == last:
        return moves
    for end in (last, last - 1):
        size = 1 + (end > first and fused[end - 1])
        origin = end - size + 1
        for to in range(origin - 1, max(first - 1, origin - _REACH), -1):
            if row[to] == row[origin]:
                break
            if not (to and fused[to - 1]):
                moves.append((rank, origin, to, size))
    size = 1 + fused[first]
    for to in range(first + size, min(last + 1, first + size - 1 + _REACH)):
        if row[to] == row[first]:
            break
        if not fused[to]:
            moves.append((rank, first, to, size))
    return moves
