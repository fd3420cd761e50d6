"""Rows to start from: known patterns, none of which has to fit the costs.

Linear placement: 1F1B's order with any number of warm-up forwards. V placement: the building blocks of Controllable
Memory (arXiv 2405.15362, section 3): the positions of one microbatch's F and B on every rank in units of equal passes,
repeated every T units. V-Min, V-Half and ZB-V are members of the family; it is cheap to decode all of it with the real
costs and keep what does best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megatron.zero_bubble.search.problem import B, F, Problem, Rows, W

_UNITS = 6
"""Passes of a rank and microbatch: F, B and W of two chunks."""


def seeds(problem: Problem) -> Iterator[Rows]:
    """Starting points for the placement of ``problem``; not all fit in its memory."""
    yield serial(problem)
    yield from handcrafted(problem)
    if problem.num_stages > problem.num_ranks:
        for full in blocks(problem):
            yield fitted(problem, [[code for code in row if code % 3 != W] for row in full])


def handcrafted(problem: Problem) -> Iterator[Rows]:
    """The orders of 1F1B and of ZB-V, cut to the memory there is."""
    if problem.num_stages == problem.num_ranks:
        yield from warm_ups(problem)
    else:
        yield fitted(problem, zb_v(problem))


def serial(problem: Problem) -> Rows:
    """One microbatch at a time: feasible whenever anything is."""
    rank_of, stages = problem.placement.stage_to_rank, range(problem.num_stages)
    rows: Rows = [[] for _ in range(problem.num_ranks)]
    for _ in range(problem.num_microbatches):
        for s in stages:
            rows[rank_of[s]].append(3 * s + F)
        for s in reversed(stages):
            rows[rank_of[s]].append(3 * s + B)
    return rows


def warm_ups(problem: Problem) -> Iterator[Rows]:
    """Rank i does about ``slope * (p - i)`` forwards before its first backward, as far as memory allows."""
    p, m = problem.num_ranks, problem.num_microbatches
    for slope in (1.0, 1.5, 2.0):
        rows = []
        for s in range(p):
            most = int(problem.limit[s] / problem.kept[s])
            lead = max(1, min(m, most, int(slope * (p - 1 - s)) + 1))
            rows.append([3 * s + F] * lead + [3 * s + B, 3 * s + F] * (m - lead) + [3 * s + B] * lead)
        yield rows


def blocks(problem: Problem) -> Iterator[Rows]:
    """Building blocks of a V: down by ``down`` units a rank, up by ``up``, with rests at the turns; rows with W's, each
    of which takes the first unit after its B that is free in every period.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    for period, down, up, top, bottom in product((6, 7, 8, 10, 12), (1, 2, 3, 4), (1, 2, 3), (0, 1, 2, 3), (1, 2)):
        if period != _UNITS and (down > 1 or up > 1):
            continue
        rows = []
        for rank in range(p):
            below = p - 1 - rank
            f0 = down * rank
            f1 = down * (p - 1) + 1 + up * below
            b1 = (down + up) * (p - 1) + 2 + top + down * rank
            b0 = (2 * down + up) * (p - 1) + 2 + top + bottom + up * below
            first, second = 3 * rank, 3 * (2 * p - 1 - rank)
            starts = [(f0, first + F), (f1, second + F), (b1, second + B), (b0, first + B)]
            taken = {x % period for x, _ in starts}
            for x, code in sorted(starts[2:]):
                slot = next((slot for slot in range(x + 1, x + period) if slot % period not in taken), x)
                taken.add(slot % period)
                starts.append((slot, code + 1))
            placed = sorted((x + period * n, code) for x, code in starts for n in range(m))
            rows.append([code for _, code in placed])
        yield rows


def zb_v(problem: Problem) -> Rows:
    """ZB-V (arXiv 2401.10241, section 6) phase by phase: no bubble at equal passes with 1F1B's memory."""
    p, m = problem.num_ranks, problem.num_microbatches
    rows = []
    for rank in range(p):
        f0, b0, f1, b1 = (3 * s + kind for s in (rank, 2 * p - 1 - rank) for kind in (F, B))
        rest, steady = p - 1 - rank, max(0, m - 2 * p + rank + 1)
        row = [f0] * (2 * rest) + [f0, f1] * rank + [f0] + [f1, b1] * (p - rank) + [f0, b0, f1, b1] * steady
        row += [b0, f1, b1] * rest + [b0, b1] * rank
        rows.append(_complete(row, (f0, f1, b1, b0), m))
    return rows


def _complete(row: list[int], codes: tuple[int, ...], m: int) -> list[int]:
    """Drop what exceeds ``m`` of a code, append what is missing."""
    kept: list[int] = []
    left = dict.fromkeys(codes, m)
    for code in row:
        if left[code]:
            left[code] -= 1
            kept.append(code)
    for code in codes:
        kept += [code] * left[code]
    return kept


def fitted(problem: Problem, rows: Rows) -> Rows:
    """The same rows, except that where the next F would not fit in memory the next B goes first."""
    result = []
    for rank, row in enumerate(rows):
        left, kept, limit = list(row), 0.0, problem.limit[rank]
        for place in range(len(left)):
            code = left[place]
            if code % 3 == F and kept + problem.kept[code // 3] > limit:
                later = next((at for at in range(place + 1, len(left)) if left[at] % 3 == B), None)
                if later is not None:
                    left.insert(place, left.pop(later))
                    code = left[place]
            kept += problem.kept[code // 3] if code % 3 == F else -problem.kept[code // 3]
        result.append(left)
    return result
