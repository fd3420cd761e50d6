"""DualPipeV's order with our passes (DeepSeek-AI's DualPipe, 2025, `dualpipev.py`): a V with F and B passes in pairs.

DualPipeV overlaps the two passes of a pair, to hide the communication between experts. With ``pairs``, so does this
schedule. Without, they run one after the other, so only the order is the same: fused backwards in the steady state, and
a fixed number of split ones in the cool-down.

rank 0 |0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3BW1--- 3F2 0BW0--- 3BW2--- 3F3 ....0BW1--- 3BW3--- 0B2 0W2 0B3 0W3 |
rank 1 |....1F0 2F0 1F1 2F1 1F2 2BW0--- 2F2 1BW0--- 1F3 2BW1--- 2F3 1BW1--- 2BW2--- 1BW2--- 2B3 1B3 2W3 1W3 |
"""

from __future__ import annotations

from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules.recipe import Recipe


def build(num_ranks: int, num_microbatches: int, _: int = 2, pairs: bool = False) -> Schedule:
    """Build DualPipeV's eight phases; with fewer than 2p microbatches, some phases are shorter or missing."""
    rows = [_Row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    order = tuple(row.write() for row in rows)
    together = frozenset[Pass]().union(*(row.together for row in rows)) if pairs else frozenset[Pass]()
    return Schedule(RECIPE.name, Placement.vee(num_ranks), num_microbatches, order, pairs=together)


class _Row:
    """The passes of one rank: chunk 0 is on the way down the V, chunk 1 on the way back up.

    Attributes:
        together: the forwards that DualPipeV overlaps with the backward that follows.
    """

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self._rank, self._num_ranks, self._num_microbatches = rank, num_ranks, num_microbatches
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._waiting: list[Pass] = []
        self._row: list[Pass] = []
        self.together: set[Pass] = set()

    def write(self) -> tuple[Pass, ...]:
        p, m, rank = self._num_ranks, self._num_microbatches, self._rank
        below = p - 1 - rank
        for _ in range(2 * below):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(below):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for number in range(m - 2 * p + rank + 1):
            self._forward(0)
            self._backward(1, paired=number > 0 or below > 0)
            self._forward(1)
            self._backward(0, paired=True)
        for _ in range(below):
            self._backward(1)
            self._forward(1)
            self._backward(0, paired=True)
        for n in range(rank + 1):
            self._backward(1, split=2 * n > rank)
            self._backward(0, split=2 * n >= rank)
        for _ in range(below):
            self._weight()
            self._backward(0, split=True)
        while self._waiting:
            self._weight()
        return tuple(self._row)

    def _forward(self, chunk: int) -> None:
        if self._forwards[chunk] < self._num_microbatches:
            self._row.append(Pass(self._stages[chunk], Kind.F, self._forwards[chunk]))
            self._forwards[chunk] += 1

    def _backward(self, chunk: int, split: bool = False, paired: bool = False) -> None:
        if self._backwards[chunk] == self._num_microbatches:
            return
        if paired and self._row[-1].kind is Kind.F:
            self.together.add(self._row[-1])
        microbatch = self._backwards[chunk]
        self._backwards[chunk] += 1
        self._row.append(Pass(self._stages[chunk], Kind.B if split else Kind.BW, microbatch))
        if split:
            self._waiting.append(Pass(self._stages[chunk], Kind.W, microbatch))

    def _weight(self) -> None:
        if self._waiting:
            self._row.append(self._waiting.pop(0))


RECIPE = Recipe(
    name="dualpipe-v",
    summary="V placement in DualPipeV's order, with the F and B of a pair run one after the other",
    bubble="~(p-1)(F+B-W)/2",
    memory="(p+1/2)M",
    build=build,
    shape="vee",
    has_pairs=True,
    only_compared=True,
)
