"""Ops that occupy several lanes are issued, and their parts queued."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, Pass, PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.simulate import Run
from megatron.zero_bubble.core.analysis.steps import steps_of
from megatron.zero_bubble.core.costs.experts import ExpertParts
from megatron.zero_bubble.core.ir.ops import ALL_TO_ALL, COMPUTE
from megatron.zero_bubble.core.ir.pairs import computes
from megatron.zero_bubble.core.plan.offload import Move
from megatron.zero_bubble.core.plan.plan_of import Additions, plan_without_messages

MS = st.sampled_from([0.0, 0.25, 1.0, 2.5, 7.0])
Exchange = tuple[str, float, float]


def costs_of(schedule: Schedule, stages: list[ExpertParts], comm_ms: float = 0.0, message_ms: float = 0.0) -> PassCosts:
    f, b, w = (tuple(sum(stage[begin:end]) for stage in stages) for begin, end in ((1, 5), (5, 9), (9, 11)))
    return PassCosts(f, b, w, comm_ms, message_ms=message_ms).with_experts(tuple(stages), 1.25)


def issued(schedule: Schedule, costs: PassCosts) -> tuple[list[list[Exchange]], list[list[float]]]:
    """Issue one op after the other: the all-to-alls of every rank, and the times at which its ops can compute."""
    rows = [deque(computes(row, schedule.pairs)) for row in schedule.order]
    hosts, rank_of = [0.0] * len(rows), schedule.placement.stage_to_rank
    lanes = [{COMPUTE: 0.0, ALL_TO_ALL: 0.0} for _ in rows]
    exchanges: list[list[Exchange]] = [[] for _ in rows]
    begins: list[list[float]] = [[] for _ in rows]
    ends: dict[Pass, float] = {}
    while any(rows):
        for rank, row in enumerate(rows):
            needed = [d for work in row[0].works for d in schedule.dependencies(work)] if row else []
            if not row or any(d not in ends for d in needed):
                continue
            op = row.popleft()
            hosts[rank] = max([hosts[rank], *(ends[d] + costs.comm(rank_of[d.stage], rank) for d in needed)])
            ends |= dict.fromkeys(op.works, hosts[rank])
            begins[rank].append(max(hosts[rank], lanes[rank][COMPUTE]))
            for lane, ms, number in op.parts(costs):
                begin = max(lanes[rank][lane], hosts[rank] if number is None else ends[op.works[number]])
                lanes[rank][lane] = begin + ms
                if number is not None:
                    ends[op.works[number]] = begin + ms
                if lane == ALL_TO_ALL:
                    exchanges[rank].append((str(op), begin, begin + ms))
    return exchanges, begins


@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(["interleaved-1f1b", "dualpipe-v", "zb-v"]), comm_ms=MS)
def test_every_part_starts_as_early_as_its_lane_and_its_pass_allow(
    data: st.DataObject, name: str, comm_ms: float
) -> None:
    schedule = build(name, num_ranks=2, num_microbatches=data.draw(st.integers(1, 6)), pairs=name != "zb-v")
    schedule = replace(schedule, overlap_experts=True)
    drawn = [data.draw(st.lists(MS, min_size=10, max_size=10)) for _ in range(schedule.num_stages)]
    costs = costs_of(schedule, [ExpertParts(data.draw(st.integers(1, 3)), *ms) for ms in drawn], comm_ms)
    timeline = simulate(schedule, costs)
    exchanges, begins = issued(schedule, costs.overlapping(True))
    lanes = timeline.lanes or ((),) * 2
    assert [[(span.op, span.start_ms, span.end_ms) for span in row] for row in lanes] == exchanges
    for rank, row in enumerate(schedule.order):
        assert tuple(span.pass_ for span in timeline.spans[rank]) == row
        assert [box.start_ms for box in timeline.boxes(rank)] == begins[rank]
        edges = [edge for box in timeline.boxes(rank) for edge in box[1:]]
        assert edges == sorted(edges), "an op has the rank until the next one computes"


DENSE = ExpertParts(1, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0, 2.0)
"""A stage without all-to-alls: its passes only compute."""


def test_what_is_no_pass_waits_on_their_lane_for_what_they_have_queued() -> None:
    schedule = replace(build("zb-h1", num_ranks=4, num_microbatches=8), overlap_experts=True)
    costs = replace(costs_of(schedule, [DENSE] * 4), host_ms=(1.0,) * 4)
    moves = (Move(Pass(0, Kind.F, 0)), Move(Pass(0, Kind.F, 1)))
    timeline = simulate(plan_without_messages(schedule, Additions(moves=moves)), costs)
    waits = [span for span in timeline.lanes[0] if span.lane == COMPUTE]
    assert len(waits) == 2 * len(moves)
    assert not [(w, span) for w in waits for span in timeline.spans[0] if span.start_ms < w.start_ms < span.end_ms]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_iteration_waits_for_what_is_queued(overlap: bool) -> None:
    schedule = replace(build("1f1b", num_ranks=1, num_microbatches=3), overlap_experts=overlap)
    costs = costs_of(schedule, [DENSE])
    run = Run([*map(list, steps_of(schedule))], schedule, costs)
    run.iteration({})
    assert run.free == [3 * 9.0]
    run.iteration({})
    assert run.free == [2 * 3 * 9.0]
