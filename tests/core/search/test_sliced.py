"""The search for schedules of sequence slices."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, Slices, build, simulate, validate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import lower
from megatron.zero_bubble.core.search.sliced import sliced_auto
from megatron.zero_bubble.planning.job.runnable import check_runnable
from tests.helpers.strategies import costs_for, cuts


@given(
    data=st.data(),
    p=st.integers(1, 5),
    m=st.integers(1, 5),
    slices=cuts,
    room=st.floats(1.0, 6.0),
    vee=st.booleans(),
)
def test_plans_are_valid_within_the_limit_and_not_below_the_bound(
    data: st.DataObject, p: int, m: int, slices: Slices, room: float, vee: bool
) -> None:
    placement = Placement.vee(p) if vee else Placement.linear(p)
    costs = data.draw(costs_for(build("zb-v" if vee else "zb-h1", num_ranks=p, num_microbatches=m)))
    memory = PassMemory.uniform(placement, 1.0, data.draw(st.floats(0.0, 1.0)))
    memory = replace(
        memory, history=tuple(data.draw(st.sampled_from([0.0, 0.1, 0.4])) * one for one in memory.activation)
    )
    least = max(sum(memory.activation[s] + 2 * memory.history[s] for s in placement.stages_of(r)) for r in range(p))
    limit = room * least
    size = {"num_ranks": p, "num_microbatches": m, "num_slices": slices}
    known = [] if vee else [build(name, **size) for name in ("seq-1f1b", "seq-zb-h1")]  # type: ignore[arg-type]
    found = sliced_auto(
        lambda on: (costs.fit(on), memory.fit(on)), [placement], m, slices, Goal("makespan", limit), known
    )
    validate(found)
    lower(found)
    check_runnable(found, p, m)
    timeline = simulate(found, costs, memory)
    assert max(most_kept(timeline, memory)) <= limit * (1 + 1e-9)
    bound = lower_bound(costs, memory, Workload(placement, m, slices), limit, "makespan").value_ms
    assert timeline.makespan_ms >= bound * (1 - 1e-9)
    for other in known:
        published = simulate(other, costs, memory)
        if max(most_kept(published, memory)) <= limit:
            assert timeline.makespan_ms <= published.makespan_ms * (1 + 1e-6)


@pytest.mark.parametrize(("n", "rate"), [(4, 0.036), (8, 0.018)])
def test_a_v_halves_the_bubble_of_slices(n: int, rate: float) -> None:
    """Nothing on a V with these slices is shorter: the bound is reached."""
    vee = Placement.vee(8)
    costs, memory = PassCosts.uniform(vee, 1.0, 1.0, 1.0), PassMemory.uniform(vee)
    limit = 1 + 8 / n
    found = sliced_auto(lambda on: (costs.fit(on), memory.fit(on)), [vee], 8, Slices.even(n), Goal("makespan", limit))
    timeline = simulate(found, costs, memory)
    assert timeline.bubble_rate("makespan") <= rate
    assert max(timeline.peak_activation) <= limit
    bound = lower_bound(costs, memory, Workload(vee, 8, Slices.even(n)), limit, "makespan").value_ms
    assert timeline.makespan_ms == pytest.approx(bound)


@pytest.mark.parametrize(
    ("placement", "m", "times", "limit", "ms"),
    [
        # W at once whenever no B or F is ready: 45 ms. To wait for them instead reaches the bound.
        (Placement.linear(3), 3, (5.0, 4.0, 4.0), 2.0, 127 / 3),
        # As many forwards ahead as the limit admits: 46.5 ms.
        (Placement.vee(4), 4, (4.0, 5.0, 1.0), 3.0, 133 / 3),
    ],
)
def test_several_ways_to_search_are_tried(
    placement: Placement, m: int, times: tuple[float, float, float], limit: float, ms: float
) -> None:
    costs, memory = PassCosts.uniform(placement, *times), PassMemory.uniform(placement)
    found = sliced_auto(
        lambda on: (costs.fit(on), memory.fit(on)), [placement], m, Slices.even(3), Goal("makespan", limit)
    )
    assert simulate(found, costs, memory).makespan_ms <= ms * (1 + 1e-9)


@given(
    p=st.integers(1, 4),
    m=st.integers(1, 4),
    slices=cuts,
    vee=st.booleans(),
    wgrad=st.floats(0.0, 1.0) | st.floats(1.0, 9.0),
    history=st.sampled_from([0.0, 0.1, 0.4]),
    states=st.sampled_from([0.0, 0.01, 0.4]),
    recomputed=st.booleans(),
    unit=st.sampled_from([1.0, 1e10 / 3]),
)
@example(p=2, m=2, slices=Slices.even(2), vee=True, wgrad=1.0, history=0.0, states=0.4, recomputed=False, unit=1e10 / 3)
@example(p=2, m=3, slices=Slices.even(3), vee=True, wgrad=1.0, history=0.4, states=0.0, recomputed=True, unit=1e10 / 3)
@example(p=2, m=4, slices=Slices.even(9), vee=False, wgrad=1.0, history=0.4, states=0.0, recomputed=False, unit=1.0)
def test_the_least_limit_is_enough(
    p: int,
    m: int,
    slices: Slices,
    vee: bool,
    wgrad: float,
    history: float,
    states: float,
    recomputed: bool,
    unit: float,
) -> None:
    """Also in bytes, whose sums are rounded by more than any fixed tolerance."""
    placement = Placement.vee(p) if vee else Placement.linear(p)
    costs, memory = PassCosts.uniform(placement, 1.0, 1.0, 1.0), PassMemory.uniform(placement, unit, wgrad * unit)
    shared, handed = (tuple(part * one for one in memory.activation) for part in (history, states))
    memory = replace(memory, history=shared, states=handed, recomputed=recomputed)

    def search(limit: float) -> None:
        found = sliced_auto(lambda on: (costs.fit(on), memory.fit(on)), [placement], m, slices, Goal("span", limit))
        assert max(most_kept(simulate(found, costs, memory), memory)) <= limit * (1 + 1e-9)

    with pytest.raises(UserError, match="raise the limit to that") as refused:
        search(0.5 * unit)
    named = re.search(r"needs up to ([\d.e+]+) on the fullest rank", str(refused.value))
    assert named is not None
    search(float(named[1]) * (1 + 1e-9))


@pytest.mark.parametrize("wgrad", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("place", [Placement.linear, Placement.vee])
def test_backwards_are_fused_where_w_does_not_fit(place: Callable[[int], Placement], wgrad: float) -> None:
    """Within the peak of Seq1F1B, which fuses all backwards, the result is not longer."""
    slices, linear, placement = Slices.even(4), Placement.linear(4), place(4)
    costs, memory = PassCosts.uniform(linear, 10.0, 20.0, 10.0), PassMemory.uniform(linear, 1.0, wgrad)
    theirs = build("seq-1f1b", num_ranks=4, num_microbatches=6, num_slices=slices)
    limit = max(most_kept(simulate(theirs, costs, memory), memory))
    known = [theirs] if placement == linear else []
    own = costs.fit(placement), memory.fit(placement)
    found = sliced_auto(lambda _: own, [placement], 6, slices, Goal(limit=limit), known)
    validate(found)
    check_runnable(found, 4, 6)
    assert max(most_kept(simulate(found, *own), own[1])) <= limit * (1 + 1e-9)
    if known:
        assert simulate(found, *own).makespan_ms <= simulate(theirs, costs, memory).makespan_ms
    else:
        assert any(p.kind is Kind.BW for p in found.passes()) == (wgrad > 1)


def test_least_memory_is_named() -> None:
    linear = Placement.linear(2)
    costs, memory = PassCosts.uniform(linear, 1.0, 1.0, 1.0), PassMemory.uniform(linear)
    with pytest.raises(UserError, match=r"needs up to 1 on the fullest rank; raise the limit to that"):
        sliced_auto(lambda _: (costs, memory), [linear], 2, Slices.even(4), Goal("span", 0.9))


@pytest.mark.parametrize("on", [Placement.interleaved(3, 3), Placement.wave(3, 4)], ids=["loop", "wave"])
def test_slices_run_on_loops_and_waves(on: Placement) -> None:
    slices, m, limit = Slices.even(2), 3, 2.5
    costs, memory = PassCosts.uniform(on, 3.0, 4.0, 2.0, 0.1), PassMemory.uniform(on)
    size = {"num_ranks": 3, "num_microbatches": m, "num_slices": slices}
    is_loop = on == Placement.interleaved(3, 3)
    known = [build("seq-interleaved-1f1b", num_chunks=3, **size)] if is_loop else []  # type: ignore[arg-type]
    found = sliced_auto(lambda on: (costs.fit(on), memory.fit(on)), [on], m, slices, Goal("makespan", limit), known)
    validate(found)
    lower(found)
    timeline = simulate(found, costs, memory)
    assert found.placement == on
    assert max(most_kept(timeline, memory)) <= limit * (1 + 1e-9)
    bound = lower_bound(costs, memory, Workload(on, m, slices), limit, "makespan").value_ms
    assert bound * (1 - 1e-9) <= timeline.makespan_ms
    for other in known:
        published = simulate(other, costs, memory)
        assert max(most_kept(published, memory)) > limit or timeline.makespan_ms <= published.makespan_ms
