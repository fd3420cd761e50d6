"""The input of the bounds: the figures of every stage, and the path of a microbatch through the stages.

Three assumptions, none of which excludes a schedule:

* Microbatches are alike and keep their order on every stage. If the k-th F (B, W) that a stage runs is relabelled as
  microbatch k, times and memory do not change, and the k-th arrival is never later than before.
* Every backward is split. A BW is a B immediately followed by its W, which needs less memory and sends its output
  earlier. With ``fused`` the opposite is assumed: B takes as long as BW, and W takes neither time nor memory. So it is
  for the stages whose backwards no schedule can split (``must_fuse``).
* W needs at most the memory that F added (``wgrad`` is cut to ``activation``), which only leaves more room; so it does
  for a BW, which keeps what F added until its end. Memory of which more microbatches fit into the limit than a float
  can count is none, which leaves more room too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Placement

_UNCOUNTED = 1e100
"""This many microbatches are more than any limit has to count."""


@dataclass(frozen=True)
class Setting:
    """One instance: durations ``f``, ``b``, ``w`` (ms), with the messages of a pass, and memory ``a`` (F to B), ``g``
    (B to W) of every stage.

    ``activation_hop[s]`` is the transfer time from stage s to s+1 and ``gradient_hop[s]`` that from s+1 to s.
    ``limit[rank]`` is the memory limit of a rank.
    """

    placement: Placement
    m: int
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    a: tuple[float, ...]
    g: tuple[float, ...]
    activation_hop: tuple[float, ...]
    gradient_hop: tuple[float, ...]
    limit: tuple[float, ...]

    @classmethod
    def of(
        cls,
        costs: PassCosts,
        memory: PassMemory,
        placement: Placement,
        m: int,
        limit: tuple[float, ...],
        fused: bool,
    ) -> Setting:
        into_forward, into_backward = costs.hops(placement)
        messages = tuple(map(sum, costs.messages_on(placement)))
        f, b = (tuple(map(add, ms, messages)) for ms in (costs.forward_ms, costs.backward_ms))
        a, g = memory.activation, tuple(map(min, memory.wgrad, memory.activation))
        if math.isfinite(most := max(limit)):
            a, g = (tuple(0.0 if kept * _UNCOUNTED < most else kept for kept in each) for each in (a, g))
        hops = into_forward[1:], into_backward[:-1]
        split = cls(placement, m, f, b, costs.wgrad_ms, a, g, *hops, limit)
        return split.with_fused(range(len(b))) if fused else split

    def with_fused(self, stages: Collection[int]) -> Setting:
        """Return this setting with all backwards of these stages fused."""
        b, w, g = list(self.b), list(self.w), list(self.g)
        for stage in stages:
            b[stage], w[stage], g[stage] = b[stage] + w[stage], 0.0, 0.0
        return replace(self, b=tuple(b), w=tuple(w), g=tuple(g))

    @property
    def num_stages(self) -> int:
        return len(self.f)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    def stages(self, rank: int) -> tuple[int, ...]:
        return self.placement.stages_of(rank)

    @cached_property
    def forward_at(self) -> tuple[float, ...]:
        """Earliest start of the first microbatch's F on every stage, relative to its start on stage 0."""
        # There is one hop fewer than stages.
        return (0.0, *accumulate(f + hop for f, hop in zip(self.f, self.activation_hop)))  # noqa: B905

    @cached_property
    def backward_left(self) -> tuple[float, ...]:
        """Least time from the start of a B on every stage to the start of the same microbatch's B on stage 0."""
        return (0.0, *accumulate(b + hop for b, hop in zip(self.b[1:], self.gradient_hop, strict=True)))

    def round_trip(self, start: int, end: int) -> float:
        """Return the least time from the start of F on stage ``start`` to that of the microbatch's B on ``end``."""
        last = self.num_stages - 1
        there = self.forward_at[last] - self.forward_at[start] + self.f[last]
        return there + self.backward_left[last] - self.backward_left[end]

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time for which all passes, with their messages, occupy a rank."""
        one = [sum(self.f[s] + self.b[s] + self.w[s] for s in self.stages(rank)) for rank in range(self.num_ranks)]
        return tuple(self.m * ms for ms in one)

    def fits(self, size: float, room: float) -> int:
        """Return how many items of ``size`` fit into ``room``, at most ``m`` per stage of the model."""
        most = self.m * self.num_stages
        # These are sums of floats, so a count just below a whole number is rounded up.
        return most if size * most <= room else int(room / size + ROUNDING)

    def whole(self, rank: int) -> float:
        """Return the memory of one microbatch on ``rank`` after F on all its chunks."""
        return sum(self.a[s] for s in self.stages(rank))


def must_fuse(memory: PassMemory, placement: Placement, limit: tuple[float, ...]) -> Iterator[int]:
    """Yield the stages of which no B fits into the limit of their rank with what it leaves to its W, besides what the F
    of the same microbatch has saved on the earlier chunks of the rank.
    """
    for rank, most in enumerate(limit):
        kept = 0.0
        for stage in placement.stages_of(rank):
            if kept + memory.wgrad[stage] > most * (1 + 2 * ROUNDING):
                yield stage
            kept += memory.activation[stage]
