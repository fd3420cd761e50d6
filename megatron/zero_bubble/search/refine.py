"""Local search: move passes on the critical path past their neighbours, and keep moves that shorten the schedule."""

from __future__ import annotations

from megatron.zero_bubble.search.dice import Dice
from megatron.zero_bubble.search.evaluate import INFEASIBLE, evaluate
from megatron.zero_bubble.search.problem import NONE, Problem, Rows
from megatron.zero_bubble.search.rows import times

_SLACK = 1e-6
_REACH = 8
"""Largest distance by which a pass is moved within a block of the critical path."""
_MEAN_WEIGHT = 0.02
"""Weight of the mean over ranks, which guides the search among moves that do not change the longest rank."""

Move = tuple[int, int, int]
"""A rank, and the old and new place of a pass in its row."""


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
        for rank, origin, to in moves[: tries - used]:
            row = rows[rank]
            row.insert(to, row.pop(origin))
            cost, mean = evaluate(problem, rows)
            used += 1
            warmth = heat * (1.0 - used / tries)
            if cost + _MEAN_WEIGHT * mean < score + warmth * dice.uniform() - _SLACK:
                score = cost + _MEAN_WEIGHT * mean
                if cost < best_cost - _SLACK:
                    best_cost, best = cost, [list(r) for r in rows]
                break
            row.insert(origin, row.pop(to))
        else:
            if heat == 0 or not moves:
                break
    return best_cost, best


def critical_moves(problem: Problem, rows: Rows, dice: Dice) -> list[Move]:
    """Return moves that break a longest path: in each block on a rank, of its last passes to the front and of its first
    pass to the back.
    """
    starts, number, places = times(problem, rows)
    tables = problem.tables
    rank_of, duration, source, hop = tables.rank, tables.duration, tables.source, tables.hop
    lateness = [s[-1] + duration[row[-1]] - o for s, row, o in zip(starts, rows, problem.origin, strict=True)]
    longest = [r for r, late in enumerate(lateness) if late >= max(lateness) - _SLACK]
    rank = longest[dice.below(len(longest))]
    place = last = len(rows[rank]) - 1
    moves: list[Move] = []
    while True:
        code, start = rows[rank][place], starts[rank][place]
        before, arrival = source[code], -1.0
        if before != NONE:
            other = rank_of[before]
            other_place = places[before][number[rank][place]]
            arrival = starts[other][other_place] + duration[before] + hop[code]
        follows = place > 0 and starts[rank][place - 1] + duration[rows[rank][place - 1]] >= start - _SLACK
        arrives = arrival >= start - _SLACK
        if follows and not (arrives and dice.uniform() < 0.5):
            place -= 1
            continue
        moves += _moves_in(rows[rank], rank, place, last)
        if not arrives:
            return moves
        rank, place = other, other_place
        last = place


def _moves_in(row: list[int], rank: int, first: int, last: int) -> list[Move]:
    """Return the moves of the block from place ``first`` to place ``last``."""
    moves: list[Move] = []
    if first == last:
        return moves
    for end in (last, last - 1):
        for to in range(end - 1, max(first - 1, end - _REACH), -1):
            if row[to] == row[end]:
                break
            moves.append((rank, end, to))
    for to in range(first + 1, min(last + 1, first + _REACH)):
        if row[to] == row[first]:
            break
        moves.append((rank, first, to))
    return moves
