"""Bounds in closed form: what a rank can and cannot do while it waits.

Each function gives a lower bound on the span of every rank, from the start of its first pass to the end of its last.
A rank that starts its first pass ``forward_at`` after the pipeline's first bounds the makespan by that much more.

Two waits are certain. Before its first B a rank has nothing but F's, as many as fit into its memory; after its last F
nothing but the B's and W's of what it then keeps, less those of the last microbatch, whose gradient is still on its
way. Whatever of the two waits is not filled is idle time. At 1F1B's memory they add up to
(p-1)(F+B-W) + 4(p-1)c, which ZB-H1 reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zero_bubble.analysis.bounds.setting import Setting

_HALVINGS = 60


def head_idle(s: Setting, rank: int) -> float:
    """Idle time between a rank's first F and its first B, whose microbatch runs F on every chunk before it."""
    stages = s.stages(rank)
    window = s.round_trip(stages[0], stages[-1])
    forward = [s.f[stage] for stage in stages]
    others = _fill(forward, [s.a[stage] for stage in stages], s.m - 1, s.limit[rank] - s.whole(rank))
    return max(0.0, window - sum(forward) - others)


def tail_idle(s: Setting, rank: int) -> float:
    """Idle time between the end of a rank's last F and the start of the same microbatch's B."""
    stages = s.stages(rank)
    last = stages[-1]
    window = s.round_trip(last, last) - s.f[last]
    room = s.limit[rank] - s.whole(rank)
    backward = [s.b[stage] + s.w[stage] for stage in stages]
    keeps, kept_for_w = [s.a[stage] for stage in stages], [s.g[stage] for stage in stages]
    wgrad = [s.w[stage] for stage in stages]
    # Both kinds at once as fractions, or counted one by one where all chunks keep the same.
    work = _fill(backward + wgrad, keeps + kept_for_w, s.m - 1, room)
    if len(set(keeps)) == len(set(kept_for_w)) == 1:
        most = min(len(stages) * (s.m - 1), s.fits(keeps[0], room))
        work = min(
            work,
            max(n * max(backward) + _fill(wgrad, kept_for_w, s.m - 1, room - n * keeps[0]) for n in range(most + 1)),
        )
    return max(0.0, window - work)


def waits(s: Setting, rank: int) -> tuple[float, bool]:
    """The idle time that both waits leave, and whether the waits are apart: some F must come after the first B."""
    apart = s.fits(s.whole(rank), s.limit[rank]) < s.m
    head, tail = head_idle(s, rank), tail_idle(s, rank)
    return (head + tail if apart else max(head, tail)), apart


def by_waits(s: Setting) -> Sequence[float]:
    """Work and what the two waits leave idle."""
    return [s.work[rank] + waits(s, rank)[0] for rank in range(s.num_ranks)]


def by_area(s: Setting) -> Sequence[float]:
    """Memory times time (Little's law): m microbatches stay at least their way to the end of the model and back.

    The limit cannot be used in full at once: n things are kept only after n-1 forwards, and at a time t before the end
    no more than what can be freed within t.
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
    # Both ramps count only where they are known to fit into the span, one after the other.
    apart = shortest * steps + (limit - most) / freed <= s.work[rank]
    return (stay + (filling + draining if apart else 0.0)) / limit


def by_fill(s: Setting) -> Sequence[float]:
    """The way to another rank's first stage, all F's and B's of that rank, and the way back."""
    spans = []
    for rank in range(s.num_ranks):
        own = s.stages(rank)[0]
        longest = 0.0
        for other in range(s.num_ranks):
            stages = s.stages(other)
            first = stages[0]
            if first < own:
                continue
            busy = s.m * sum(s.f[k] + s.b[k] for k in stages)
            way_back = s.backward_left[first] - s.backward_left[own] - s.b[first] + s.b[own] if first > own else 0.0
            longest = max(longest, s.forward_at[first] - s.forward_at[own] + busy + way_back)
        spans.append(longest + s.w[own])
    return spans


def by_head_chain(s: Setting, objective: str, floor: float) -> float:
    """The least span (or makespan) at which all ranks can wait for their first B at once; 0 unless one stage a rank.

    A rank's wait is whole F's and idle time. It is at least the next rank's wait and the two passes and transfers
    between them. Where F's do not fit the wait evenly, either it is idle for the remainder or the rank before waits
    longer. ``floor`` is a bound known already; the answer is looked for above it.
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
    """Whether every rank can wait for its first B with at most ``idle`` of that wait idle, from the last rank up."""
    wait = 0.0
    for rank in reversed(range(s.num_ranks)):
        if rank == s.num_ranks - 1:
            needed = s.f[rank]
        else:
            needed = wait + s.f[rank] + s.b[rank + 1] + s.activation_hop[rank] + s.gradient_hop[rank]
        # Idle time within rounding of what is needed is enough: the answer must not exceed the true bound.
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


def _fill(values: Sequence[float], weights: Sequence[float], count: int, room: float) -> float:
    """At most this much value fits into ``room`` with at most ``count`` of each; whole ones where weights agree."""
    if room < 0:
        return 0.0
    if not math.isfinite(room):
        return count * sum(values)
    whole = len(set(weights)) == 1 and weights[0] > 0
    left = float(int(room / weights[0] + 1e-9)) if whole else room * (1 + 1e-9)
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
