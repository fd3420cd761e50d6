"""Seeds: rows of known patterns from which the search starts; they need not fit the costs.

Trying a whole family of building blocks with the real costs, and keeping the best, is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from megatron.zero_bubble.core.search.blocks import Bent, Thinned, ThinnedChain, chain_block, linear_block, vee_block
from megatron.zero_bubble.core.search.problem import B, F, Problem, Rows, W
from megatron.zero_bubble.core.search.units import breadth_first, grouped, interleaved, zero_pp

_MORE_ROOM = 1.01
"""From this memory on, in units of 1F1B's, steep seeds are tried."""
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
    elif not problem.is_vee:
        yield from units(problem)
        for top, down, up in product((0, 1, 2), (1, 2, 3, 4), (1, 2, 3, 4)):
            yield partial(chain_block, down=down, up=up, top=top)
        for top, down, up in product((0, 2), (1, 2), (1, 2)):
            yield ThinnedChain(down, up, top)
    else:
        yield zb_v
        for period, down, up in (*product((6,), (1, 2, 3, 4), (1, 2, 3)), *product((7, 8, 10, 12), (1,), (1,))):
            for top, bottom in product((0, 1, 2, 3), (1, 2)):
                yield partial(vee_block, period=period, down=down, up=up, top=top, bottom=bottom)
        for top, bottom in product((0, 1, 2, 3), (1, 2)):
            for down, up in ((1, 1), (2, 1)):
                yield Thinned(down, up, top, bottom)
            for down, late, up in ((1, 2, 1), (1, 4, 2), (2, 4, 2)):
                yield Bent(down, late, up, top, bottom)


def classics(problem: Problem) -> Iterator[Seed]:
    """Yield the seeds that are always used, independent of their results on a miniature."""
    if problem.num_stages == problem.num_ranks:
        for slope in (1.0, 1.5, 2.0):
            yield partial(leading, slope=slope)
        yield partial(linear_block, period=3, down=2, up=2, top=0)


def units(problem: Problem) -> Iterator[Seed]:
    """Yield patterns of units of microbatches, for any number of stages per rank."""
    p = problem.num_ranks
    for factor, lag in ((1, 0), (1, 1), (2, 0), (2, 2)):
        yield partial(interleaved, factor=factor, lag=lag)
        for group in sorted({(p + 1) // 2, (3 * p + 3) // 4, p}):
            yield partial(grouped, group=group, factor=factor, lag=lag)
    yield breadth_first
    yield zero_pp


def steep(problem: Problem) -> Iterator[Seed]:
    """Yield seeds for more memory than 1F1B needs, with several stages per rank: ZB-V, stretched, or ZB-Interleaved,
    and blocks, first those that use just this memory. ``vee_block`` takes (down + up) / 6 of 1F1B's memory.
    """
    if problem.num_stages == problem.num_ranks or problem.room <= _MORE_ROOM:
        return
    of_room = 6 * problem.room
    if problem.is_vee:
        for stretch in (1.0, 1.1, 1.2, 1.3):
            yield partial(zb_v, stretch=stretch)
    elif problem.is_loop:
        for factor, lag in ((2, 2), (2, 1), (1, 1)):
            yield partial(interleaved, factor=factor, lag=lag)
        of_room /= 1 + problem.num_ranks / problem.num_stages
    for slope in sorted(range(7, 13) if problem.is_vee else range(3, 13), key=lambda slope: abs(slope - of_room)):
        if problem.is_vee:
            yield partial(vee_block, period=6, down=slope - slope // 2, up=slope // 2, top=0, bottom=1)
        else:
            yield partial(chain_block, down=slope - slope // 2, up=slope // 2, top=0)


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


def zb_v(problem: Problem, stretch: float = 1.0) -> Rows:
    """ZB-V (arXiv 2401.10241, section 6) phase by phase: with equal passes, no bubble within 1F1B's memory.

    Phases that are as long as for ``stretch`` times the ranks take as many times the memory, and leave a microbatch
    more time for its way from rank to rank.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    rows = []
    for rank in range(p):
        f0, b0, w0, f1, b1, w1 = (3 * s + kind for s in (rank, 2 * p - 1 - rank) for kind in (F, B, W))
        before, rest = round(stretch * rank), round(stretch * (p - 1 - rank))
        row = [f0] * (2 * rest + 1) + [f1, f0] * before + [f1, b1, w1] * (rest + 1)
        row += [f0, b0, w0, f1, b1, w1] * max(0, m - before - rest - 1)
        row += [b0, b1] * before + [b0, w0] * (rest + 1)
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
