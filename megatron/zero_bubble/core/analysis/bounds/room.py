"""The time that a rank needs to make room in its memory: F passes fill the memory, and B and W passes free it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.analysis.score import ROUNDING


def time_to_make_room(s: Setting, rank: int, counts: Sequence[int]) -> float:
    """Return the least time from the start of the rank's first B for a microbatch i to the start of a later F, if the
    rank has then run, for microbatch i and later ones, ``counts`` of F on each of its chunks, including that F.

    At the start of that B, the rank has freed nothing of these microbatches, so it holds the memory of all their F
    passes so far. It runs the other ones after that, and as many B and W passes as free the memory for them.
    """
    stages, limit = s.stages(rank), s.limit[rank]
    excess = sum(n * s.a[k] for n, k in zip(counts, stages, strict=True)) - limit
    if excess <= limit * 2 * ROUNDING:
        return 0.0
    held = s.fits(min(s.a[k] for k in stages), limit)
    forwards = max(0, sum(counts) - held - 1)
    # The F belongs to the last microbatch, of which no B can run before.
    most = (max(counts) - 1) * len(stages)
    return forwards * min(s.f[k] for k in stages) + _time_to_free(s, stages, excess - limit * 2 * ROUNDING, most)


def _time_to_free(s: Setting, stages: Sequence[int], excess: float, most: int) -> float:
    """Return the least time in which at most ``most`` B, and at most one W after each, free ``excess``."""
    b, w = min(s.b[k] for k in stages), min(s.w[k] for k in stages)
    by_b, by_w = max(s.a[k] - s.g[k] for k in stages), max(s.g[k] for k in stages)
    least = min(most, math.ceil(excess / (by_b + by_w)))
    if by_w == 0:
        return least * b
    return min(n * b + max(0, math.ceil((excess - n * by_b) / by_w)) * w for n in range(least, most + 1))
