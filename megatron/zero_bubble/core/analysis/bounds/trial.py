"""Bounds by contradiction, for small pipelines: assume an end, and derive an order of passes until none is possible.

With an end, every pass has an earliest start and a latest end. Two passes of a rank that do not fit one after the
other in one order must come in the other (J. Carlier and E. Pinson, 1989, *immediate selection*), and a pass that frees
memory must come before an F that would exceed the limit without it. Each order that is derived narrows the times of
other passes. Where this ends without a contradiction, the two orders of a pair are tried in turn (P. Martin and D.
Shmoys, 1996, *shaving*): if one leads to a contradiction, the other holds. An end that leads to a contradiction is too
early.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import combinations, product

from megatron.zero_bubble.core.analysis.bounds.paths import Paths
from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import B, F, W

_FIRST_STEP, _LAST_STEP = 1e-2, 1e-4
"""By how much the first end that is tried exceeds the known bound, and the least excess that is tried."""


class Contradiction(Exception):
    """No schedule ends as early as assumed."""


class Exhausted(Exception):
    """The effort is used up."""


class Effort:
    """Counts down the pairs of passes that may still be compared."""

    def __init__(self, pairs: float) -> None:
        self.left = pairs

    def spend(self, pairs: int) -> None:
        """Raises Exhausted when nothing is left."""
        self.left -= pairs
        if self.left < 0:
            raise Exhausted


def by_contradiction(paths: Paths, rank: int | None, value: float, effort: Effort, shaved: bool) -> float:
    """Raise the bound ``value`` on the span of ``rank``, or on the makespan (None), as far as ``effort`` allows.

    ``shaved`` also tries both orders of each pair, which refutes later ends, but takes much more effort.
    """
    step = 0.0 if shaved else _FIRST_STEP * value
    while True:
        trial = Trial(paths, rank, value + step, effort)
        try:
            trial.derive()
            if shaved:
                trial.shave()
        except Contradiction:
            value = trial.next_end
        except Exhausted:
            return value
        else:
            if step == 0.0:
                return value
            step = step / 4 if step > _LAST_STEP * value else 0.0


class Trial:
    """The passes of ``paths`` in a schedule that ends at ``end``, counted from the first F of ``rank``.

    Attributes:
        next_end: the least end with which a comparison made so far would have had another result. After a
            contradiction, every end before it leads to the same contradiction.
    """

    def __init__(self, paths: Paths, rank: int | None, end: float, effort: Effort) -> None:
        s = self.setting = paths.setting
        self.paths, self.length, self.effort = paths, paths.length, effort
        self.end, self.next_end = end * (1 + ROUNDING), math.inf
        self.heads, self.tails = paths.around(rank)
        self.rows = [self._row(at) for at in range(s.num_ranks)]
        self.rank_of = {n: rank for rank, row in enumerate(self.rows) for n in row}
        self.forward, self.adds = self._memory()
        self.earlier = self._earlier()
        self.open = [(i, j) for row in self.rows for i, j in combinations(row, 2) if not self._decided(i, j)]

    def _row(self, rank: int) -> list[int]:
        s, number = self.setting, self.paths.number
        return sorted(
            number(Pass(stage, kind, j)) for stage in s.stages(rank) for j in range(s.m) for kind in (F, B, W)
        )

    def _memory(self) -> tuple[list[int], list[float]]:
        """For every pass, the F of its microbatch on its stage, and the memory that it adds; negative if it frees."""
        s, paths = self.setting, self.paths
        forward, adds = [0] * len(self.length), [0.0] * len(self.length)
        for stage, j in product(range(s.num_stages), range(s.m)):
            f, b, w = (paths.number(Pass(stage, kind, j)) for kind in (F, B, W))
            forward[f] = forward[b] = forward[w] = f
            adds[f], adds[b], adds[w] = s.a[stage], s.g[stage] - s.a[stage], -s.g[stage]
        return forward, adds

    def _earlier(self) -> list[int]:
        """For every pass, the set of passes that come before it in every schedule, as bits of a number."""
        earlier = [0] * len(self.length)
        for n, edges in enumerate(self.paths.before):
            for first, _ in edges:
                earlier[n] |= earlier[first] | 1 << first
        return earlier

    def _decided(self, i: int, j: int) -> bool:
        return bool(self.earlier[j] >> i & 1 or self.earlier[i] >> j & 1)

    def order(self, first: int, second: int) -> None:
        """Let ``first`` come before ``second``, and all that comes before the one before all that follows the other.

        Raises:
            Contradiction: if ``second`` comes before ``first``.
        """
        if self.earlier[first] >> second & 1:
            raise Contradiction
        new = self.earlier[first] | 1 << first
        for n, earlier in enumerate(self.earlier):
            if n == second or earlier >> second & 1:
                self.earlier[n] = earlier | new

    def derive(self) -> None:
        """Derive orders and times until nothing changes.

        Raises:
            Contradiction: if no schedule ends at ``end``.
            Exhausted: if the effort does not suffice.
        """
        while True:
            self.effort.spend(sum(len(row) ** 2 for row in self.rows))
            self._narrow()
            orders = [*self._by_memory(), *self._by_time()]
            for first, second in orders:
                self.order(first, second)
            if not orders:
                return
            self.open = [pair for pair in self.open if not self._decided(*pair)]

    def shave(self) -> None:
        """Try both orders of each pair that is not decided; raises as ``derive`` does."""
        changed = True
        while changed:
            changed = False
            for pair in self.open:
                for first, second in (pair, pair[::-1]):
                    if not self._decided(*pair) and self._contradicts(first, second):
                        self.order(second, first)
                        self.derive()
                        changed = True

    def _contradicts(self, first: int, second: int) -> bool:
        trial = copy(self)
        trial.heads, trial.tails, trial.earlier = self.heads[:], self.tails[:], self.earlier[:]
        try:
            trial.order(first, second)
            trial.derive()
        except Contradiction:
            self.next_end = min(self.next_end, trial.next_end)
            return True
        return False

    def _exceeds(self, time: float) -> bool:
        if time > self.end:
            self.next_end = min(self.next_end, time)
        return time > self.end

    def _narrow(self) -> None:
        """Update the least time before and after each pass.

        Raises:
            Contradiction: if a pass does not fit between them.
        """
        order = sorted(range(len(self.length)), key=lambda n: self.earlier[n].bit_count())
        heads, tails, length, earlier = self.heads, self.tails, self.length, self.earlier
        seen: list[list[tuple[float, int]]] = [[] for _ in self.rows]  # per rank, by head
        for n in order:
            on_rank, known = seen[self.rank_of[n]], earlier[n]
            ends = [heads[first] + length[first] + transfer for first, transfer in self.paths.before[n]]
            heads[n] = max(heads[n], self._busy(at for at in on_rank if known >> at[1] & 1), *ends)
            insort(on_rank, (heads[n], n))
        seen = [[] for _ in self.rows]
        for n in reversed(order):
            on_rank = seen[self.rank_of[n]]
            tails[n] = max(tails[n], self._busy(at for at in on_rank if earlier[at[1]] >> n & 1))
            insort(on_rank, (tails[n], n))
            for first, transfer in self.paths.before[n]:
                tails[first] = max(tails[first], tails[n] + length[n] + transfer)
        for n, ms in enumerate(length):
            if self._exceeds(heads[n] + ms + tails[n]):
                raise Contradiction

    def _busy(self, passes: Iterable[tuple[float, int]]) -> float:
        """Return the least time in which a rank can run passes, given with and sorted by the least time before each."""
        end = -math.inf
        for time, n in passes:
            end = (time if time > end else end) + self.length[n]
        return end

    def _by_time(self) -> Iterator[tuple[int, int]]:
        """Yield the order of pairs of passes that do not fit one after the other in the opposite order."""
        heads, tails, length = self.heads, self.tails, self.length
        for i, j in self.open:
            both = length[i] + length[j]
            if self._exceeds(heads[j] + both + tails[i]):
                yield i, j
            if self._exceeds(heads[i] + both + tails[j]):
                yield j, i

    def _by_memory(self) -> Iterator[tuple[int, int]]:
        """Yield passes that free memory, each with an F for which there would not be enough memory before it.

        Raises:
            Contradiction: if there is not enough memory for an F in any order.
        """
        for row, limit in zip(self.rows, self.setting.limit, strict=True):
            for n in row:
                if self._is_forward(n):
                    yield from ((first, n) for first in self._room_for(n, row, limit * (1 + ROUNDING)))

    def _room_for(self, n: int, row: Sequence[int], limit: float) -> Iterator[int]:
        """Yield the passes that must make room for the F ``n``: with one of them later, more than ``limit`` is held."""
        known = self.earlier[n] | 1 << n
        held = sum(self.adds[other] for other in row if known >> other & 1 and self._is_forward(other))
        frees = [
            other
            for other in row
            if self.adds[other] < 0 and known >> self.forward[other] & 1 and not self.earlier[other] >> n & 1
        ]
        held += sum(self.adds[other] for other in frees)
        if held > limit:
            raise Contradiction
        for first in frees:
            if not known >> first & 1:
                later = sum(self.adds[other] for other in frees if other == first or self.earlier[other] >> first & 1)
                if held - later > limit:
                    yield first

    def _is_forward(self, n: int) -> bool:
        return self.forward[n] == n
