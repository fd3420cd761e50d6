"""Seeds: rows of known patterns from which the search starts; they need not fit the costs.

A building block (Controllable Memory, arXiv 2405.15362, section 3) is the positions of one microbatch's passes on every
rank, in units of equal passes, repeated every T units. 1F1B, ZB-H1, ZB-H2, V-Min, V-Half and the steady state of ZB-V
belong to this family. Trying the whole family with the real costs, and keeping the best, is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product

from megatron.zero_bubble.search.problem import B, F, Problem, Rows, W

Seed = Callable[[Problem], Rows]
"""A function that makes rows for a problem, with any number of microbatches."""


def seeds(problem: Problem) -> Iterator[Seed]:
    """Yield the seeds for the placement of ``problem``, simplest first; not all of them fit in its memory."""
    yield serial
    if problem.num_stages == problem.num_ranks:
        for slope in (1.0, 1.5, 2.0, 3.0):
            yield partial(leading, slope=slope)
        for period, top, down, up in product((3, 4, 5), (0, 1), (1, 2, 3, 4), (1, 2, 3, 4)):
            yield partial(linear_block, period=period, down=down, up=up, top=top)
    else:
        yield zb_v
        for period, down, up in (*product((6,), (1, 2, 3, 4), (1, 2, 3)), *product((7, 8, 10, 12), (1,), (1,))):
            for top, bottom in product((0, 1, 2, 3), (1, 2)):
                yield partial(vee_block, period=period, down=down, up=up, top=top, bottom=bottom)
        for (down, late), bend in product(((1, 2), (2, 1), (2, 3), (3, 2), (2, 4), (4, 2)), (0.25, 0.5, 0.75)):
            for top, bottom in product((0, 1, 2, 3), (1, 2)):
                yield partial(vee_block, period=6, down=down, up=1, top=top, bottom=bottom, late=late, bend=bend)


def classics(problem: Problem) -> Iterator[Seed]:
    """Yield the seeds that are always used, independent of their results on a miniature."""
    if problem.num_stages == problem.num_ranks:
        for slope in (1.0, 1.5, 2.0):
            yield partial(leading, slope=slope)
        yield partial(linear_block, period=3, down=2, up=2, top=0)


def serial(problem: Problem) -> Rows:
    """Run one microbatch at a time, which is feasible whenever any schedule is."""
    rank_of, stages = problem.placement.stage_to_rank, range(problem.num_stages)
    rows: Rows = [[] for _ in range(problem.num_ranks)]
    for s in stages:
        rows[rank_of[s]].append(3 * s + F)
    for s in reversed(stages):
        rows[rank_of[s]] += [3 * s + B, 3 * s + W]
    return [row * problem.num_microbatches for row in rows]


def leading(problem: Problem, slope: float) -> Rows:
    """1F1B with ``slope`` more forwards per rank before the first backward, within memory, such as ZB-H1 and ZB-H2."""
    p, m = problem.num_ranks, problem.num_microbatches
    rows = []
    for s in range(p):
        most = int(problem.limit[s] / problem.kept[s])
        lead = max(1, min(m, most, int(slope * (p - 1 - s)) + 1))
        f, b, w = 3 * s + F, 3 * s + B, 3 * s + W
        rows.append([f] * lead + [b, w, f] * (m - lead) + [b, w] * lead)
    return rows


def linear_block(problem: Problem, period: int, down: int, up: int, top: int) -> Rows:
    """A block in which each next rank runs F ``down`` units later and B ``up`` units earlier, with a pause of ``top``
    units between F and B on the last rank.
    """
    p = problem.num_ranks
    rows = []
    for rank in range(p):
        forward = down * rank
        backward = down * (p - 1) + 1 + top + up * (p - 1 - rank)
        rows.append(_repeated(problem, period, {3 * rank + F: forward, 3 * rank + B: backward}))
    return rows


def vee_block(
    problem: Problem, period: int, down: int, up: int, top: int, bottom: int, late: int = 0, bend: float = 1.0
) -> Rows:
    """A block on a V: ``down`` units per rank towards higher ranks, ``up`` units towards lower ranks, with a pause of
    ``top`` units between forward and backward, and of ``bottom`` units on the last rank between its two backwards.

    After the share ``bend`` of the ranks, passes towards higher ranks take ``late`` units per rank, which gives blocks
    with memory between those of the two slopes.
    """
    p = problem.num_ranks
    bent = round(bend * p)
    way = [down * min(rank, bent) + late * max(0, rank - bent) for rank in range(p)]
    rows = []
    for rank in range(p):
        below = p - 1 - rank
        first, second = 3 * rank, 3 * (2 * p - 1 - rank)
        starts = {
            first + F: way[rank],
            second + F: way[-1] + 1 + up * below,
            second + B: way[-1] + up * (p - 1) + 2 + top + way[rank],
            first + B: 2 * way[-1] + up * (p - 1) + 2 + top + bottom + up * below,
        }
        rows.append(_repeated(problem, period, starts))
    return rows


def _repeated(problem: Problem, period: int, starts: dict[int, int]) -> list[int]:
    """Return the row of one rank: F and B at ``starts``, and each W in the first unit after its B that is free in every
    period.
    """
    taken = {start % period for start in starts.values()}
    placed = dict(starts)
    for code, start in sorted(starts.items(), key=lambda item: item[1]):
        if code % 3 == B:
            slot = next((x for x in range(start + 1, start + period) if x % period not in taken), start)
            taken.add(slot % period)
            placed[code + 1] = slot
    # All periods are equal, except that passes of microbatches before the first and after the last are omitted.
    m = problem.num_microbatches
    cycle = sorted((start % period, start // period, code) for code, start in placed.items())
    changes = sorted({turn + ends for _, turn, _ in cycle for ends in (0, m)})
    row: list[int] = []
    for turn, change in pairwise(changes):
        row += [code for _, late, code in cycle if late <= turn < late + m] * (change - turn)
    return row


def zb_v(problem: Problem) -> Rows:
    """ZB-V (arXiv 2401.10241, section 6) phase by phase: with equal passes, no bubble within 1F1B's memory."""
    p, m = problem.num_ranks, problem.num_microbatches
    rows = []
    for rank in range(p):
        f0, b0, w0, f1, b1, w1 = (3 * s + kind for s in (rank, 2 * p - 1 - rank) for kind in (F, B, W))
        rest = p - 1 - rank
        row = [f0] * (2 * rest + 1) + [f1, f0] * rank + [f1, b1, w1] * (rest + 1)
        row += [f0, b0, w0, f1, b1, w1] * max(0, m - p)
        row += [b0, b1] * rank + [b0, w0] * (rest + 1)
        rows.append(_complete(row, (f0, f1, b1, b0, w1, w0), m))
    return rows


def _complete(row: list[int], codes: tuple[int, ...], m: int) -> list[int]:
    """Drop passes of a code beyond ``m``, and append missing ones."""
    kept: list[int] = []
    left = dict.fromkeys(codes, m)
    for code in row:
        if left[code]:
            left[code] -= 1
            kept.append(code)
    for code in codes:
        kept += [code] * left[code]
    return kept
