"""``timed`` is ``simulate``, compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.experts import ExpertParts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.core.schedules import SCHEDULES, build
from megatron.zero_bubble.core.search import timed as module
from megatron.zero_bubble.core.search.auto import zb_auto
from megatron.zero_bubble.core.search.timed import timed

milliseconds = st.floats(0.1, 50.0)


def uneven(num_stages: int) -> tuple[PassCosts, PassMemory]:
    f, b, w = (tuple(base + 0.7 * stage for stage in range(num_stages)) for base in (3.1, 2.9, 1.7))
    memory = PassMemory(tuple(1 + 0.1 * stage for stage in range(num_stages)), (0.3,) * num_stages)
    return PassCosts(f, b, w, 0.53, {(0, 1): 1.9}), memory


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("message_ms", [0.0, 0.37])
def test_every_known_schedule_is_timed_as_simulated(name: str, message_ms: float) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=12)
    costs, memory = uneven(schedule.num_stages)
    figures = replace(costs, message_ms=message_ms), memory
    for each in (schedule, schedule.forward_only()):
        assert timed(each, *figures) == simulate(each, *figures)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved-1f1b"])
def test_schedules_that_hide_all_to_alls_are_timed_as_simulated(name: str) -> None:
    schedule = replace(build(name, num_ranks=2, num_microbatches=6), overlap_experts=True)
    costs, memory = uneven(schedule.num_stages)
    parts = ExpertParts(2, *(0.1 * part for part in range(1, 11)))
    figures = replace(costs, experts=(parts,) * schedule.num_stages), memory
    assert timed(schedule, *figures) == simulate(schedule, *figures)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_searched_schedules_are_timed_as_simulated(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    stages = 2 * num_ranks
    figures = st.lists(milliseconds, min_size=stages, max_size=stages).map(tuple)
    f, b, w = (data.draw(figures) for _ in range(3))
    costs = PassCosts(f, b, w, data.draw(st.floats(0, 5)))
    memory = PassMemory(data.draw(figures), data.draw(figures))
    count = data.draw(st.integers(1, 9))
    schedule = zb_auto(costs, memory, num_ranks, count, 1e4, effort=0.02)
    fitting = costs.fit(schedule.placement), memory.fit(schedule.placement)
    assert timed(schedule, *fitting) == simulate(schedule, *fitting)


@pytest.mark.parametrize("name", ["zb-v", "interleaved-1f1b"])
def test_the_compiled_loops_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "simulate", None)
    schedule = build(name, num_ranks=2, num_microbatches=4)
    assert timed(schedule, *uneven(4)).makespan_ms > 0


def test_other_passes_are_simulated() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    swap = {2: 3, 3: 2}
    last = tuple(p._replace(microbatch=swap.get(p.microbatch, p.microbatch)) for p in schedule.order[1])
    other = replace(schedule, order=(schedule.order[0], last))  # the last rank takes microbatch 3 before 2
    assert timed(other, *uneven(2)) == simulate(other, *uneven(2))


def test_errors_are_those_of_simulate() -> None:
    stuck = Schedule.from_text("stuck", Placement.linear(2), 1, ["0F0 0B0 0W0".split(), "1B0 1F0 1W0".split()])
    missing = Schedule("missing", Placement.linear(1), 1, ((Pass(0, Kind.F, 0), Pass(0, Kind.W, 0)),))
    for schedule in (stuck, missing):
        messages = []
        for run in (timed, simulate):
            with pytest.raises(UserError) as caught:
                run(schedule, *uneven(schedule.num_stages))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    sliced = Schedule.from_text("sliced", Placement.linear(1), 1, ["0F0.1 0B0.1 0W0.1".split()])
    with pytest.raises(UserError):
        timed(sliced, *uneven(1))
    with pytest.raises(UserError, match="one figure per stage"):
        timed(stuck, *uneven(3))
