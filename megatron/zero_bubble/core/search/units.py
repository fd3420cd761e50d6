"""Patterns on a loop, in units of microbatches that run through one chunk after the other, as rows.

They have the orders of interleaved 1F1B (arXiv 2104.04473), of GIS and GIS-H (arXiv 2503.01328) and of ZeroPP
(arXiv 2402.03791), and of ZB-H1 and ZB-H2 (arXiv 2401.10241) with the stages of a loop. ``core/schedules/`` builds the
same orders by name; a test compares the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from megatron.zero_bubble.core.search.problem import B, F, Problem, Rows, W

_GAP = 2
"""F and B, in W's: the passes that a rank waits for per rank between it and the end of the pipeline."""


def interleaved(problem: Problem, factor: int = 2, lag: int = 0) -> Rows:
    """Interleaved 1F1B with split backwards: rank i warms up with ``factor`` (p-1-i) passes and a unit of each chunk
    but the last; its W's start ``lag`` i backwards late. The last unit also contains the remaining microbatches.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    firsts = range(0, max(1, m - p + 1), p)
    return _one_f_one_b(problem, [end - first for first, end in pairwise((*firsts, m))], factor, lag)


def grouped(problem: Problem, group: int, factor: int = 1, lag: int = 0) -> Rows:
    """GIS for units of at most ``group`` microbatches and about the same size, none smaller than half of the ranks;
    with a ``lag``, the W's of rank i start ``lag`` i backwards late.
    """
    m, least = problem.num_microbatches, (problem.num_ranks + 1) // 2
    number = -(-m // group)
    if m < number * least:
        number = max(1, number - 1)
    firsts = [m * unit // number for unit in range(number + 1)]
    return _one_f_one_b(problem, [end - first for first, end in pairwise(firsts)], factor, lag)


def _one_f_one_b(problem: Problem, units: Sequence[int], factor: int, lag: int) -> Rows:
    placement, p = problem.placement, problem.num_ranks
    rows = []
    for rank in range(p):
        stages = placement.stages_of(rank)
        forwards = [3 * s + F for size in units for s in stages for _ in range(size)]
        backwards = [3 * s + B for size in units for s in reversed(stages) for _ in range(size)]
        total, late = len(forwards), min(len(forwards), lag * rank)
        warmup = min(total, (len(stages) - 1) * max(units) + factor * (p - 1 - rank))
        wgrads = [backward + W - B for backward in backwards]
        row, ends = forwards[:warmup], sorted({0, min(late, total), total - warmup, total})
        for start, end in pairwise(ends):  # between two ends, the same kinds of passes take turns
            columns = [backwards[start:end]]
            if start < total - warmup:
                columns.insert(0, forwards[warmup + start : warmup + end])
            if start >= late:
                columns.append(wgrads[start - late : end - late])
            row += chain.from_iterable(zip(*columns, strict=True))
        rows.append(row + wgrads[total - late :])
    return rows


def breadth_first(problem: Problem) -> Rows:
    """All microbatches run through one chunk before the next (arXiv 2211.05953), with split backwards."""
    return [
        [3 * s + F for s in stages for _ in range(problem.num_microbatches)]
        + [code for s in reversed(stages) for _ in range(problem.num_microbatches) for code in (3 * s + B, 3 * s + W)]
        for stages in map(problem.placement.stages_of, range(problem.num_ranks))
    ]


def zero_pp(problem: Problem) -> Rows:
    """Breadth-first for units of one microbatch per rank; the W's of a unit fill the waits of the next."""
    p, m = problem.num_ranks, problem.num_microbatches
    full, rest = divmod(m, p)
    sizes = [p] * full + [rest] * (rest > 0)
    return [list(_zero_pp_row(problem, rank, sizes)) for rank in range(p)]


def _zero_pp_row(problem: Problem, rank: int, sizes: Sequence[int]) -> Iterator[int]:
    p, stages = problem.num_ranks, problem.placement.stages_of(rank)
    left: deque[int] = deque()  # the W's that the unit before has left
    for number, size in enumerate(sizes):
        yield from _taken(left, _GAP * rank)
        yield from (3 * s + F for s in stages for _ in range(size))
        yield from _taken(left, len(left))
        leaves = 0 if number == len(sizes) - 1 else _GAP * (p - 1)
        runs_at_once = len(stages) * size - leaves
        for s in reversed(stages):
            yield from (3 * s + B for _ in range(size))
            left.extend(3 * s + W for _ in range(size))
            now = max(0, min(len(left), runs_at_once))
            runs_at_once -= now
            yield from _taken(left, now)


def _taken(codes: deque[int], number: int) -> list[int]:
    return [codes.popleft() for _ in range(min(number, len(codes)))]
