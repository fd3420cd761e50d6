"""The bound by the way from one rank to another, the work of that rank, and the way back.

Take two passes X and Y of a rank, X before Y. What the rank can run before X starts and after Y has ended is limited,
by dependencies and by memory. It runs the rest of its work between the start of X and the end of Y. Before that lies
the way from the first pass of any other rank to X, and after it the way from Y to the last pass of that other rank.

X is the rank's first F or its first B, and Y its last F or its last B. On a V, the way from the first rank over the
last one adds up to 6m + 6p - 3k - 1 if every pass takes 1 and memory has room for k of them. That is the length of
V-Half and of most V-Min (arXiv 2405.15362, figure 13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.analysis.bounds.windows import fill, head_work, tail_work


def by_ways(s: Setting) -> Sequence[float]:
    """A bound on the span of every rank, from the best way over any rank."""
    longest = [0.0] * s.num_ranks
    for middle in range(s.num_ranks):
        stages = s.stages(middle)
        first, last = stages[0], stages[-1]
        before = head_work(s, middle)
        after_forward = tail_work(s, middle) + sum(s.b[k] + s.w[k] for k in stages)
        after_backward = _wgrad_left(s, middle)
        apart = s.fits(s.whole(middle), s.limit[middle]) < s.m
        for rank in range(s.num_ranks):
            own = s.stages(rank)[0]
            to_forward = s.forward_at[first] - s.forward_at[own] if first >= own else -math.inf
            to_backward = s.round_trip(own, last) - before
            end = s.b[own] + s.w[own]
            from_forward = s.round_trip(last, own) - s.f[last] + end - after_forward
            from_backward = -math.inf
            if first >= own:
                from_backward = s.backward_left[first] - s.backward_left[own] - s.b[first] + end - after_backward
            pairs = [(to_forward, from_forward), (to_forward, from_backward), (to_backward, from_backward)]
            if apart:
                pairs.append((to_backward, from_forward))
            longest[rank] = max(longest[rank], s.work[middle] + max(map(sum, pairs)))
    return longest


def _wgrad_left(s: Setting, rank: int) -> float:
    """Largest work of a rank after its last B: W passes, as many as fit into memory next to that B."""
    stages = s.stages(rank)
    first = stages[0]
    wgrad = [s.w[k] for k in stages]
    others = fill(wgrad, [s.g[k] for k in stages], s.m, s.limit[rank] - s.a[first])
    return min(s.w[first] + others, s.m * sum(wgrad))
