"""Building blocks (Controllable Memory, arXiv 2405.15362, section 3) as rows.

A building block is the positions of one microbatch's passes on every rank, in units of equal passes, repeated every
``period`` units. 1F1B, ZB-H1, V-Min, V-Half and the steady state of ZB-V belong to this family.

``Thinned`` and ``Bent`` are families of blocks between two members, fitted to the memory limit: as dense as it allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from math import ceil

from megatron.zero_bubble.core.search.evaluate import INFEASIBLE
from megatron.zero_bubble.core.search.loops import loops
from megatron.zero_bubble.core.search.problem import B, F, Problem, Rows

_EQUAL_PASSES = 6
"""The period of a V in units: F, B and W of both stages of a rank."""


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


def vee_block(problem: Problem, period: int, down: int, up: int, top: int, bottom: int) -> Rows:
    """A block on a V: ``down`` units per rank towards higher ranks, ``up`` units towards lower ranks, with a pause of
    ``top`` units between forward and backward, and of ``bottom`` units on the last rank between its two backwards.
    """
    return _vee(problem, period, [down * rank for rank in range(problem.num_ranks)], up, top, bottom)


def _vee(
    problem: Problem, period: int, way: Sequence[int], up: int, top: int, bottom: int, run: int | None = None
) -> Rows:
    """``vee_block`` with the positions of the first stages' F on every rank, ``way``; after every ``run`` microbatches,
    one period is left empty.
    """
    p = problem.num_ranks
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
        rows.append(_repeated(problem, period, starts, run))
    return rows


def chain_block(problem: Problem, down: int, up: int, top: int, run: int | None = None) -> Rows:
    """A block for any placement: every pass in the first free unit ``down`` or ``up`` units after the one before,
    towards higher or lower ranks, with a pause of ``top`` units between forward and backward; the next stage of the
    same rank, or of a rank that is no neighbour, follows at once. After every ``run`` microbatches, one period is left
    empty.

    As many periods as a microbatch stays are in flight, so gentle slopes take little memory: on a wave about
    (down + up) / 6 of 1F1B's, and (v+1)/v of that on a loop with v stages per rank.
    """
    placement, p = problem.placement, problem.num_ranks
    rank_of, last = placement.stage_to_rank, problem.num_stages - 1
    period = 3 * max(len(placement.stages_of(rank)) for rank in range(p))
    starts: list[dict[int, int]] = [{} for _ in range(p)]
    taken: list[set[int]] = [set() for _ in range(p)]
    time, before = 0, 0
    for code in (*range(F, 3 * last + 3, 3), *range(3 * last + B, 0, -3)):
        rank = rank_of[code // 3]
        pause = 1 + top if code == 3 * last + B else 1
        if rank != before:
            pause = down if before < rank <= before + 1 else up if before - 1 <= rank < before else 1
        time = next(x for x in count(time + pause if starts[0] else 0) if x % period not in taken[rank])
        taken[rank].add(time % period)
        starts[rank][code] = time
        before = rank
    return [_repeated(problem, period, starts[rank], run) for rank in range(p)]


@dataclass(frozen=True)
class ThinnedChain:
    """``chain_block`` with one period left empty after every run of microbatches: the longest run that fits in memory,
    or none left empty if the block fits as it is.
    """

    down: int
    up: int
    top: int

    def __call__(self, problem: Problem) -> Rows:
        return self.rows(problem, _most(self, problem))

    def rows(self, problem: Problem, more: int) -> Rows:
        """The rows with runs of ``1 + more`` microbatches; from one per rank on, without empty periods."""
        run = 1 + more if more < problem.num_ranks else None
        return chain_block(problem, self.down, self.up, self.top, run)


@dataclass(frozen=True)
class Thinned:
    """``vee_block`` with equal passes, and one period left empty after every run of microbatches; the longest run that
    fits in memory, or no period left empty if the block fits as it is.
    """

    down: int
    up: int
    top: int
    bottom: int

    def __call__(self, problem: Problem) -> Rows:
        return self.rows(problem, _most(self, problem))

    def rows(self, problem: Problem, more: int) -> Rows:
        """The rows with runs of ``1 + more`` microbatches; from one per rank on, without empty periods."""
        way = [self.down * rank for rank in range(problem.num_ranks)]
        run = 1 + more if more < problem.num_ranks else None
        return _vee(problem, _EQUAL_PASSES, way, self.up, self.top, self.bottom, run)


@dataclass(frozen=True)
class Bent:
    """``vee_block`` with equal passes and two slopes towards higher ranks: ``down`` units per rank on the first ranks,
    ``late`` units on the last; as many ranks with the larger slope, which needs more memory, as fit.
    """

    down: int
    late: int
    up: int
    top: int
    bottom: int

    def __call__(self, problem: Problem) -> Rows:
        return self.rows(problem, _most(self, problem))

    def rows(self, problem: Problem, more: int) -> Rows:
        """The rows with the larger slope on ``more`` ranks."""
        p = problem.num_ranks
        bend = more if self.down > self.late else p - more
        way = [self.down * min(rank, bend) + self.late * max(0, rank - bend) for rank in range(p)]
        return _vee(problem, _EQUAL_PASSES, way, self.up, self.top, self.bottom)


def _most(block: Thinned | ThinnedChain | Bent, problem: Problem) -> int:
    """The largest ``more`` for which the rows of ``block`` fit in memory; 0 if none do."""
    held = max(limit / kept for limit, kept in zip(problem.limit, problem.kept, strict=False))
    few = min(problem.num_microbatches, ceil(held) + 2)  # enough for the peak
    return _most_of_few(block, problem.shortened(few))


@lru_cache(maxsize=1024)
def _most_of_few(block: Thinned | ThinnedChain | Bent, problem: Problem) -> int:
    loop = loops(problem)

    def fits(more: int) -> bool:
        return loop.evaluate(loop.pack(block.rows(problem, more)))[0] < INFEASIBLE

    most, too_many = 0, problem.num_ranks
    if fits(too_many):
        return too_many
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    return most


def _repeated(problem: Problem, period: int, starts: dict[int, int], run: int | None = None) -> list[int]:
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
    m = problem.num_microbatches
    num_slots = m if run is None else m + (m - 1) // run
    # All periods are equal, except that passes of slots before the first and after the last are omitted.
    cycle = sorted((start % period, start // period, code) for code, start in placed.items())
    changes = sorted({turn + ends for _, turn, _ in cycle for ends in (0, num_slots)})
    row: list[int] = []
    for turn, change in pairwise(changes):
        row += [code for _, late, code in cycle if late <= turn < late + num_slots] * (change - turn)
    return row if run is None else _without_every(run + 1, row)


def _without_every(number: int, row: list[int]) -> list[int]:
    seen = dict.fromkeys(row, 0)
    kept = []
    for code in row:
        seen[code] += 1
        if seen[code] % number:
            kept.append(code)
    return kept
