"""Copies that delay no pass: the timeline is that of a simulation, and no plan has one that the prover refuses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.analysis.undelayed import undelayed
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Op, Plan
from megatron.zero_bubble.core.plan.communicate import communicate
from megatron.zero_bubble.core.plan.offload import Move, lifespans, offload
from megatron.zero_bubble.core.plan.prove import prove
from megatron.zero_bubble.core.plan.select import Selection

NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "gis", "pipe-offload")


def simulated(name: str, d: int, m: int, k: float) -> tuple[Timeline, PassCosts, PassMemory]:
    schedule = build(name, num_ranks=d, num_microbatches=m)
    costs = PassCosts.uniform(schedule.placement, 2.0, 3.0, 2.0, 0.1)
    costs = replace(costs, host_ms=tuple(2 * k * ms for ms in costs.forward_ms))
    memory = PassMemory.uniform(schedule.placement, 1.0, 0.4)
    return simulate(schedule, costs, memory), costs, memory


def assert_alike(fast: Timeline, slow: Timeline) -> None:
    assert fast.peak_activation == pytest.approx(slow.peak_activation)
    for own, other in zip(fast.spans, slow.spans, strict=True):
        assert [span.pass_ for span in own] == [span.pass_ for span in other]
        assert [span[1:] for span in own] == [pytest.approx(span[1:]) for span in other]
    for own, other in zip(fast.lanes, slow.lanes, strict=bool(slow.lanes)):
        assert [span[:2] for span in own] == [span[:2] for span in other]
        assert [span[2:] for span in own] == [pytest.approx(span[2:]) for span in other]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 10), st.floats(0.1, 2.0))
def test_hidden_copies_have_the_times_of_a_simulation(name: str, d: int, m: int, k: float) -> None:
    before, costs, memory = simulated(name, d, m, k)
    plan = offload(Plan.bare(before.schedule), Selection(before, costs, memory).moves())
    found = undelayed(before, plan, costs, memory)
    assert found is not None, "what is selected delays nothing"
    assert_alike(found, simulate(plan, costs, memory))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_the_prover_refuses_or_that_is_longer_has_none(name: str) -> None:
    """Any moves, of which an added op, or one of the passes, is then removed, repeated or put elsewhere."""
    refused = accepted = 0
    for seed in range(200):
        draw = Random(seed)
        before, costs, memory = simulated(name, draw.randrange(1, 4), draw.randrange(1, 6), draw.uniform(0.01, 0.2))
        moves = []
        for span in (span for row in before.schedule.order for span in lifespans(row)):
            out, back, after = draw.randrange(3), draw.randrange(3), draw.randrange(2)
            if out + back + after < span.length and draw.random() < 0.6:
                moves.append(Move(span.forward, out, back, after))
        plan = offload(Plan.bare(before.schedule), moves)
        rows = [list(row) for row in plan.ops]
        _edit(draw.choice(rows), draw)
        plan = replace(plan, ops=tuple(map(tuple, rows)))
        found = undelayed(before, plan, costs, memory)
        try:
            prove(plan)
            prove(communicate(plan))
        except PlanError:
            refused += 1
            assert found is None, f"seed {seed}"
            continue
        if found is not None:
            accepted += 1
            assert_alike(found, simulate(plan, costs, memory))
    assert min(refused, accepted) > 20


def _edit(row: list[Op], draw: Random) -> None:
    places = [place for place, op in enumerate(row) if draw.random() < 0.2 or not isinstance(op, Compute)]
    if not places or draw.random() < 0.3:
        return
    place = draw.choice(places)
    op = row.pop(place)
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        row.insert(min(max(0, place + draw.randrange(-4, 5)), len(row)), op)


def test_messages_and_delays_are_left_to_the_simulation() -> None:
    before, costs, memory = simulated("zb-h2", 4, 8, 0.5)
    moves = Selection(before, costs, memory).moves()
    slow = replace(costs, host_ms=tuple(3 * ms for ms in costs.host_ms))
    plan = offload(Plan.bare(before.schedule), moves)
    assert undelayed(before, plan, costs, memory) is not None
    assert undelayed(before, plan, slow, memory) is None
