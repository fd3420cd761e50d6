"""Synthetic traces: a simulated iteration with injected delays."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.zero_bubble import PassCosts, Schedule
from megatron.zero_bubble.core.analysis.steps import advance, steps_of
from megatron.zero_bubble.core.analysis.timeline import Span
from megatron.zero_bubble.core.analysis.trace import RankTrace, Received, Sent, Trace
from megatron.zero_bubble.core.ir import Pass

Delays = Mapping[Pass, float]
NONE: Delays = {}


def run(
    schedule: Schedule, costs: PassCosts, slow: Delays = NONE, transfer: Delays = NONE, host: Delays = NONE
) -> Trace:
    """Simulate an iteration with extra milliseconds per pass.

    Args:
        slow: added to the pass's duration.
        transfer: added to the transfer of the pass's output.
        host: added before the pass starts.
    """
    rank_of = schedule.placement.stage_to_rank
    ends: dict[Pass, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule.order]
    sends: list[list[Sent]] = [[] for _ in schedule.order]
    receives: list[list[Received]] = [[] for _ in schedule.order]
    for rank, position, _ in advance(steps_of(schedule), ends):
        p = schedule.order[rank][position]
        ready = rows[rank][-1].end_ms if rows[rank] else 0.0
        for d in schedule.dependencies(p):
            source = rank_of[d.stage]
            if source != rank:
                arrived = max(ready, ends[d] + costs.comm(source, rank) + transfer.get(d, 0.0))
                sends[source].append(Sent(d, rank, ends[d]))
                receives[rank].append(Received(d, source, ready, ready, arrived))
                ready = arrived
        start = ready + host.get(p, 0.0)
        ends[p] = start + costs.duration(p, schedule.slices) + slow.get(p, 0.0)
        rows[rank].append(Span(p, start, ends[p]))
    parts = zip(rows, sends, receives, strict=True)
    return Trace.of(
        schedule.name,
        tuple(RankTrace(tuple(r), tuple(sorted(s, key=lambda sent: sent.at_ms)), tuple(got)) for r, s, got in parts),
        schedule.slices,
    )
