"""Offloading in plans: selections, places of the ops, their memory, and what the proof rejects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.core.analysis.memory import host_peaks, memory_curve
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.ir import Compute, Kind, Op, Pass, Plan
from megatron.zero_bubble.core.ir.offload import Discard, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.core.plan import Additions, plan_of, prove
from megatron.zero_bubble.core.plan.offload import (
    Move,
    check_host_memory,
    lifespans,
    offload,
    parse_share,
    select_longest,
)
from tests.helpers.plans import plan_from_text

NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b")
FIRST = Pass(0, Kind.F, 0)


def offloaded(name: str, share: float = 1.0, post_validation: bool = False, out: int = 1, back: int = 1) -> Plan:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    return plan_of(
        schedule, Additions(post_validation=post_validation, moves=tuple(select_longest(schedule, share, out, back)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_more_offload_never_raises_the_peak(name: str) -> None:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    plans = [offloaded(name, share) for share in shares]
    placement = plans[0].schedule.placement
    costs, memory = PassCosts.uniform(placement, 5.0, 6.0, 4.0, 0.5), PassMemory.uniform(placement, 8.0, 2.0)
    costs = replace(costs, host_ms=(2.0,) * placement.num_stages)
    timelines = [simulate(plan, costs, memory) for plan in plans]
    peaks = [timeline.peak_activation for timeline in timelines]
    for fewer, more in pairwise(peaks):
        assert all(after <= before for before, after in zip(fewer, more, strict=True))
    assert peaks[-1][0] < peaks[0][0]
    for timeline in timelines:
        for curve in memory_curve(timeline, memory):
            assert curve[-1].amount == pytest.approx(0.0)
            assert min(kept.amount for kept in curve) >= -1e-9


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_share_only_adds_moves(name: str) -> None:
    """So no rank needs more memory at any time, whatever a forward saves."""
    schedule = build(name, num_ranks=4, num_microbatches=9)
    moves = [set(select_longest(schedule, percent / 100)) for percent in range(101)]
    assert all(fewer <= more for fewer, more in pairwise(moves)) and len(set(map(len, moves))) > 8


def test_memory_depends_only_on_the_order() -> None:
    """However long copies take, the same ops hold the same memory at the same places in the row."""
    plan = offloaded("zb-h2")
    placement, peaks = plan.schedule.placement, set()
    memory = PassMemory.uniform(placement, 8.0, 2.0)
    for host_ms in (0.0, 3.0, 50.0):
        costs = replace(PassCosts.uniform(placement, 5.0, 6.0, 4.0), host_ms=(host_ms,) * placement.num_stages)
        peaks.add(simulate(plan, costs, memory).peak_activation)
    assert len(peaks) == 1


def test_selection_spreads_the_share_over_the_longest_lifespans() -> None:
    schedule = build("zb-h2", num_ranks=4, num_microbatches=8)
    half = [move.forward for move in select_longest(schedule, 0.5) if move.forward.stage == 0]
    assert [forward.microbatch for forward in half] == [1, 3, 5, 7]
    schedule = build("interleaved-1f1b", num_ranks=4, num_microbatches=8)
    half = [move.forward for move in select_longest(schedule, 0.5) if move.forward.stage % 4 == 0]
    assert {forward.stage for forward in half} == {0}, "the first chunk lives longest"
    assert select_longest(schedule, 0.0) == ()


def test_backward_that_follows_at_once_keeps_its_values() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    moves = select_longest(schedule, 1.0)
    assert not [move for move in moves if move.forward.stage == 3]
    for row in schedule.order:
        for span in lifespans(row):
            assert (span.forward in {move.forward for move in moves}) == (span.length > 3)


def test_text_form_round_trip() -> None:
    plan = offloaded("zb-h2")
    read = plan_from_text(plan.schedule, plan.to_text())
    assert read.ops == plan.ops and read.digest == plan.digest != offloaded("zb-h2", 0.5).digest
    assert {"0F0^", "0F0~", "0F0v"} <= set(plan.to_text()[0])


def _without(row: tuple[Op, ...], *ops: Op) -> tuple[Op, ...]:
    assert set(ops) <= set(row), "the edit must change something"
    return tuple(op for op in row if op not in ops)


def _moved(row: tuple[Op, ...], op: Op, before: Op) -> tuple[Op, ...]:
    rest = _without(row, op)
    at = rest.index(before)
    return (*rest[:at], op, *rest[at:])


BACKWARD = Compute(Pass(0, Kind.B, 0))


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda row: _moved(row, BACKWARD, Fetch(FIRST)), "0F0:saved is used by 0B0 but is not there"),
        (
            lambda row: _moved(row, Fetch(FIRST), ReleaseDevice(FIRST)),
            "0F0v needs 0F0:host, which rank 0 does not have",
        ),
        (
            lambda row: _moved(row, ReleaseDevice(FIRST), Evict(FIRST)),
            "0F0~ needs 0F0:leaving, which rank 0 does not have",
        ),
        (lambda row: _moved(row, Evict(FIRST), Compute(FIRST)), "0F0:saved is used by 0F0\\^ but is not there"),
        (lambda row: _moved(row, BACKWARD, Reclaim(FIRST)), "0F0:saved is used by 0B0 but is not there"),
        (lambda row: _moved(row, Reclaim(FIRST), Fetch(FIRST)), "0F0_ needs 0F0:coming, which rank 0 does not have"),
        (lambda row: _without(row, Fetch(FIRST)), "0F0_ needs 0F0:coming, which rank 0 does not have"),
        (lambda row: _without(row, Fetch(FIRST), Reclaim(FIRST)), "0F0:saved is used by 0B0 but is not there"),
        (lambda row: _without(row, Reclaim(FIRST)), "0F0:saved is used by 0B0 but is not there"),
        (lambda row: _without(row, Fetch(FIRST), BACKWARD), "including 0B0|leaves .* behind"),
        (lambda row: (*row, Evict(FIRST)), "0F0:saved is used by 0F0\\^ but is not there"),
    ],
)
def test_misplaced_ops_are_rejected(edit: Callable[[tuple[Op, ...]], tuple[Op, ...]], what: str) -> None:
    plan = offloaded("zb-h2")
    prove(plan)
    with pytest.raises(PlanError, match=what):
        prove(replace(plan, ops=(edit(plan.ops[0]), *plan.ops[1:])))


def test_host_memory_left_behind_is_rejected() -> None:
    """Also of an op that waits for the copy back, and leaves the value in both places."""

    class Keep(Reclaim):
        __slots__ = ()

        def effects(self, flow):  # type: ignore[no-untyped-def]
            return super().effects(flow)._replace(takes=(self.coming,))

    plan = offloaded("zb-h2")
    row = tuple(Keep(op.forward) if op == Reclaim(FIRST) else op for op in plan.ops[0])
    with pytest.raises(PlanError, match="0F0\\^ leaves the host memory of 0F0 behind"):
        prove(replace(plan, ops=(row, *plan.ops[1:])))


def test_host_memory_left_after_a_rejected_step_is_rejected() -> None:
    plan = offloaded("zb-h2", post_validation=True)
    prove(plan)
    discard = next(op for op in plan.drain[0] if isinstance(op, Discard))
    drain = tuple(op for op in plan.drain[0] if op != discard)
    with pytest.raises(PlanError, match=f"leaves the host memory of {discard.forward} behind"):
        prove(replace(plan, drain=(drain, *plan.drain[1:])))


def test_too_much_on_the_host_is_rejected() -> None:
    plan = offloaded("zb-h2")
    memory = PassMemory.uniform(plan.schedule.placement, 8.0, 2.0)
    most = max(host_peaks(plan, memory))
    check_host_memory(plan, memory, most)
    with pytest.raises(PlanError, match=f"rank 0 would have {most:g} in host memory, and the limit is {most - 8:g}"):
        check_host_memory(plan, memory, most - 8)


def test_move_that_leaves_no_time_is_rejected() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    with pytest.raises(PlanError, match="3F0v needs 3F0:host"):
        plan_of(schedule, Additions(moves=(Move(Pass(3, Kind.F, 0), 1, 1),)))


def test_no_moves_change_nothing() -> None:
    plan = offloaded("zb-h2", 0.0)
    assert offload(plan, ()) is plan


@pytest.mark.parametrize("text", ["some", "101%", "50", "%", "-1%", "nan%"])
def test_bad_shares_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="the share to offload is all, none or a percentage"):
        parse_share(text)


def test_shares() -> None:
    assert [parse_share(text) for text in ("none", "0%", "12.5%", "all")] == [0.0, 0.0, 0.125, 1.0]


def test_fetch_behind_its_backward_is_refused_without_messages_too() -> None:
    plan = offload(Plan.bare(build("zb-h1", num_ranks=2, num_microbatches=6)), [Move(Pass(0, Kind.F, 2), 0, 0)])
    prove(plan)
    row = list(plan.ops[0])
    place = next(place for place, op in enumerate(row) if isinstance(op, Fetch))
    row[place : place + 3] = row[place + 2], row[place], row[place + 1]
    with pytest.raises(PlanError, match="0F2:saved is used by 0B2 but is not there"):
        prove(replace(plan, ops=(tuple(row), plan.ops[1])))
