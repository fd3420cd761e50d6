"""Bounds in closed form, from the work that can fill the waits of a rank.

Each function gives a lower bound on the span of every rank, from the start of its first pass to the end of its last.
The bound on the makespan is higher by ``forward_at``, the least time from the pipeline's first pass to the rank's.

Two waits are unavoidable. Before its first B, a rank can run only F passes, as many as fit into its memory. After its
last F, it can run only the B and W passes of the microbatches that it then holds, except the last one, whose gradient
has not arrived. The part of the waits that is not filled is idle time. With 1F1B's memory the idle times add up to
(p-1)(F+B-W) + 4(p-1)c, which ZB-H1 reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zero_bubble.core.analysis.bounds.setting import Setting
from megatron.zero_bubble.core.analysis.score import ROUNDING

_HALVINGS = 60


def head_work(s: Setting, rank: int) -> float:
    """Largest work of a rank before its first B: the F passes of that microbatch, and others that fit into memory."""
    stages = s.stages(rank)
    forward = [s.f[stage] for stage in stages]
    room = s.limit[rank] - s.whole(rank)
    return sum(forward) + fill(forward, [s.a[stage] for stage in stages], s.m - 1, room)


def tail_work(s: Setting, rank: int) -> float:
    """Largest work of a rank after its last F, without the B and W passes of the same microbatch."""
    stages = s.stages(rank)
    room = s.limit[rank] - s.whole(rank)
    backward = [s.b[stage] + s.w[stage] for stage in stages]
    keeps, kept_for_w = [s.a[stage] for stage in stages], [s.g[stage] for stage in stages]
    wgrad = [s.w[stage] for stage in stages]
    # Fill with B and W fractionally; if all chunks need the same memory, also enumerate the number of B passes.
    work = fill(backward + wgrad, keeps + kept_for_w, s.m - 1, room)
    if len(set(keeps)) == len(set(kept_for_w)) == 1:
        most = min(len(stages) * (s.m - 1), s.fits(keeps[0], room))
        work = min(
            work,
            max(n * max(backward) + fill(wgrad, kept_for_w, s.m - 1, room - n * keeps[0]) for n in range(most + 1)),
        )
    return min(work, (s.m - 1) * sum(backward))


def head_idle(s: Setting, rank: int) -> float:
    """Idle time between the first F and the first B of a rank; that microbatch runs F on all chunks before its B."""
    stages = s.stages(rank)
    return max(0.0, s.round_trip(stages[0], stages[-1]) - head_work(s, rank))


def tail_idle(s: Setting, rank: int) -> float:
    """Idle time between the end of a rank's last F and the start of the same microbatch's B."""
    last = s.stages(rank)[-1]
    return max(0.0, s.round_trip(last, last) - s.f[last] - tail_work(s, rank))


def waits(s: Setting, rank: int) -> tuple[float, bool]:
    """Return the idle time of both waits, and whether the waits are disjoint: some F must come after the first B."""
    apart = s.fits(s.whole(rank), s.limit[rank]) < s.m
    head, tail = head_idle(s, rank), tail_idle(s, rank)
    return (head + tail if apart else max(head, tail)), apart


def by_waits(s: Setting) -> Sequence[float]:
    """The sum of a rank's work and the idle time of its two waits."""
    return [s.work[rank] + waits(s, rank)[0] for rank in range(s.num_ranks)]


def by_area(s: Setting) -> Sequence[float]:
    """Memory times time (Little's law): each of m microbatches stays for at least its round trip to the last stage.

    The limit cannot be fully used at all times: n items are stored only after n-1 forwards, and at time t before the
    end, only as much is stored as can be freed within t.
    """
    return [_area_span(s, rank) if math.isfinite(s.limit[rank]) else 0.0 for rank in range(s.num_ranks)]


def _area_span(s: Setting, rank: int) -> float:
    stages = s.stages(rank)
    most = max(s.a[k] for k in stages)
    all_alike = {s.a[k] for k in stages} == {s.g[k] for k in stages} == {most}
    limit = s.limit[rank]
    if all_alike:
        limit = min(limit, s.fits(most, limit) * most)
    stay = s.m * sum(s.a[k] * (s.round_trip(k, k) + s.b[k]) + s.g[k] * s.w[k] for k in stages)

    shortest = min(s.f[k] for k in stages)
    steps = int(limit / most)
    filling = shortest * (steps * limit - most * steps * (steps + 1) / 2)
    freed = max(_density(*part) for k in stages for part in ((s.a[k], s.b[k] + s.w[k]), (s.g[k], s.w[k])))
    draining = (limit - most) ** 2 / (2 * freed)
    # The two ramps count only if they are known to fit into the span one after the other.
    apart = shortest * steps + (limit - most) / freed <= s.work[rank]
    return (stay + (filling + draining if apart else 0.0)) / limit


def by_head_chain(s: Setting, objective: str, floor: float) -> float:
    """The least span (or makespan) at which the waits of all ranks for their first B are consistent; 0 for placements
    with more than one stage per rank.

    The wait of a rank consists of whole F passes and idle time. It is at least the wait of the next rank plus the two
    passes and transfers between them. If F passes do not fill the wait evenly, either the rank is idle for the
    remainder or the previous rank waits longer. ``floor`` is a known bound; the search starts from it.
    """
    if s.placement.stage_to_rank != tuple(range(s.num_ranks)):
        return 0.0
    spare = []
    for rank in range(s.num_ranks):
        _, apart = waits(s, rank)
        late = s.forward_at[rank] if objective == "makespan" else 0.0
        spare.append(s.work[rank] + late + (tail_idle(s, rank) if apart else 0.0))
    if _chain_holds(s, [floor - busy for busy in spare]):
        return floor
    low, high = floor, 2 * floor + sum(s.f) + sum(s.b) + 2 * (sum(s.activation_hop) + sum(s.gradient_hop))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _chain_holds(s, [middle - busy for busy in spare]):
            high = middle
        else:
            low = middle
    return low


def _chain_holds(s: Setting, idle: Sequence[float]) -> bool:
    """Whether every rank, from the last to the first, can wait for its first B with at most ``idle`` idle time."""
    wait = 0.0
    for rank in reversed(range(s.num_ranks)):
        if rank == s.num_ranks - 1:
            needed = s.f[rank]
        else:
            needed = wait + s.f[rank] + s.b[rank + 1] + s.activation_hop[rank] + s.gradient_hop[rank]
        # Allow a rounding error in the idle time: the result must not exceed the true bound.
        spare = idle[rank] + 1e-12 * needed
        most = min(s.m, s.fits(s.a[rank], s.limit[rank]))
        whole = min(most, int(needed / s.f[rank])) if s.f[rank] > 0 else 0
        if needed - whole * s.f[rank] <= spare:
            wait = needed
        elif whole < most and s.f[rank] > 0 and spare >= 0:
            wait = (whole + 1) * s.f[rank]
        else:
            return False
    return True


def fill(values: Sequence[float], weights: Sequence[float], count: int, room: float) -> float:
    """Largest total value that fits into ``room`` with at most ``count`` of each item; only whole items if all weights
    are equal. Rounding errors can leave a room below 0, in which items without weight still fit.
    """
    room = max(0.0, room)
    if not math.isfinite(room):
        return count * sum(values)
    whole = len(set(weights)) == 1 and weights[0] > 0
    left = float(int(room / weights[0] + ROUNDING)) if whole else room * (1 + ROUNDING)
    total = 0.0
    for value, weight in sorted(zip(values, weights, strict=True), key=lambda item: _density(*item), reverse=True):
        size = 1.0 if whole else weight
        taken = min(float(count), left / size) if size > 0 else float(count)
        total += taken * value
        left -= taken * size
    return total


def _density(value: float, weight: float) -> float:
    if weight > 0:
        return value / weight
    return math.inf if value > 0 else 0.0
