"""Local search: move a pass along the critical path past its neighbours, keep what shortens the schedule."""

from __future__ import annotations

from random import Random

from megatron.zero_bubble.search.decode import INFEASIBLE, decode
from megatron.zero_bubble.search.problem import NONE, Problem, Rows, W

_SLACK = 1e-7
_REACH = 8
"""How far along a block of the critical path a pass is moved."""
_MEAN_WEIGHT = 0.02
"""The mean over ranks guides the search where the longest rank stays as it is."""

Move = tuple[int, int, int]
"""Rank, from where, to where in its row of F and B."""


def improve(problem: Problem, rows: Rows, eagerness: float, tries: int, heat: float) -> tuple[float, Rows]:
    """The best cost and rows found from ``rows``.

    Args:
        problem: what the rows are for.
        rows: F and B of each rank.
        eagerness: of ``decode``.
        tries: how many rows may be decoded.
        heat: ms by which a move may worsen the schedule and still be kept, at first; it falls to 0.
    """
    random = Random(0)
    current = [list(row) for row in rows]
    cost, mean, full = decode(problem, current, eagerness)
    best, best_rows = cost, rows
    score, used = cost + _MEAN_WEIGHT * mean, 1
    while used < tries and best < INFEASIBLE:
        moves = critical_moves(problem, full, random)
        random.shuffle(moves)
        for rank, start, end in moves:
            row = current[rank]
            row.insert(end, row.pop(start))
            cost, mean, new = decode(problem, current, eagerness)
            used += 1
            if cost + _MEAN_WEIGHT * mean < score + heat * (1 - used / tries) * random.random() - _SLACK:
                score, full = cost + _MEAN_WEIGHT * mean, new
                if cost < best - _SLACK:
                    best, best_rows = cost, [list(r) for r in current]
                break
            row.insert(start, row.pop(end))
            if used >= tries:
                break
        else:
            if heat == 0 or not moves:
                break

    return best, best_rows


def critical_moves(problem: Problem, full: Rows, random: Random) -> list[Move]:
    """Moves that break the longest path: its blocks' last passes to the front, their first ones to the back."""
    starts, microbatch_of, place_of = _timeline(problem, full)
    duration, source, hop = problem.tables.duration, problem.tables.source, problem.tables.hop
    lateness = [s[-1] + duration[row[-1]] - o for s, row, o in zip(starts, full, problem.origin, strict=True)]
    worst = max(lateness)
    rank = random.choice([r for r, late in enumerate(lateness) if late > worst - _SLACK])
    at = len(full[rank]) - 1
    moves: list[Move] = []
    block = [at]
    while True:
        code, start = full[rank][at], starts[rank][at]
        before = source[code]
        arrives = -1.0
        if before != NONE:
            n = microbatch_of[rank][at]
            other, place = place_of[before][n]
            arrives = starts[other][place] + duration[before] + hop[code]
        follows = at > 0 and starts[rank][at - 1] + duration[full[rank][at - 1]] > start - _SLACK
        if follows and (arrives < start - _SLACK or random.random() < 0.5):
            at -= 1
            block.append(at)
            continue
        moves += _moves_in(full[rank], rank, block)
        if arrives < start - _SLACK:
            return moves
        rank, at = other, place
        block = [at]


def _timeline(problem: Problem, full: Rows):
    duration, source, hop = problem.tables.duration, problem.tables.source, problem.tables.hop
    ends: list[list[float]] = [[] for _ in duration]
    ends.append([0.0] * problem.num_microbatches)
    place_of: list[list[tuple[int, int]]] = [[] for _ in duration]
    starts: list[list[float]] = [[] for _ in full]
    numbers: list[list[int]] = [[] for _ in full]
    free = [0.0] * len(full)
    waits: dict[int, int] = {}
    runnable = list(range(len(full)))
    while runnable:
        rank = runnable.pop()
        row = full[rank]
        now = free[rank]
        for at in range(len(starts[rank]), len(row)):
            code = row[at]
            n = len(ends[code])
            inputs = ends[source[code]]
            if n >= len(inputs):
                waits[source[code]] = rank
                break
            start = inputs[n] + hop[code]
            if start < now:
                start = now
            now = start + duration[code]
            ends[code].append(now)
            place_of[code].append((rank, at))
            starts[rank].append(start)
            numbers[rank].append(n)
            if code in waits:
                runnable.append(waits.pop(code))
        free[rank] = now
    return starts, numbers, place_of


def _moves_in(row: list[int], rank: int, block: list[int]) -> list[Move]:
    """Moves of a block, given as places last to first, in terms of the row without W's."""
    passes = [at for at in reversed(block) if row[at] % 3 != W]
    if len(passes) < 2:
        return []
    first = sum(1 for code in row[: passes[0]] if code % 3 != W)
    codes = [row[at] for at in passes]
    moves = []
    last = len(passes) - 1
    for end in {last, last - 1}:
        for to in range(end - 1, max(-1, end - _REACH), -1):
            if codes[to] == codes[end]:
                break
            moves.append((rank, first + end, first + to))
    for to in range(1, min(len(passes), _REACH)):
        if codes[to] == codes[0]:
            break
        moves.append((rank, first, first + to))
    return moves
