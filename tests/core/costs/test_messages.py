"""The time that messages take from passes: the same in simulation, search, bounds and files."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, PassMemory, Placement, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir.passes import B, F, Pass, W
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.loops import Reference, loops
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.timed import timed
from tests.helpers.instances import peak_memory, random_instance, random_schedule
from tests.helpers.strategies import costs_for, schedules

message_ms = st.floats(0.01, 20.0)


def spans(schedule: Schedule, costs: PassCosts) -> dict[str, tuple[float, float]]:
    return {str(p): (start, end) for row in simulate(schedule, costs).spans for p, start, end in row}


def test_a_message_occupies_both_of_its_ranks() -> None:
    """F = 2, B = 3, W = 1 and transfers of 1 ms: a message takes half a ms before the transfer, and again after it."""
    schedule = build("zb-h1", num_ranks=2, num_microbatches=1)
    costs = PassCosts((2.0,) * 2, (3.0,) * 2, (1.0,) * 2, 1.0, message_ms=0.5)
    assert spans(schedule, costs) == {
        "0F0": (0.0, 2.5), "1F0": (3.5, 6.0), "1B0": (6.0, 9.5), "1W0": (9.5, 10.5), "0B0": (10.5, 14.0),
        "0W0": (14.0, 15.0),
    }  # fmt: skip
    timeline = simulate(schedule, costs)
    assert (timeline.work_ms, timeline.busy_ms, timeline.span_ms) == (6.0, 7.0, 15.0)
    assert timeline.bubble_rate("span") == 9 / 15, "messages are not work"


def test_a_fused_backward_sends_at_its_end() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    costs = PassCosts((2.0,) * 2, (3.0,) * 2, (1.0,) * 2, message_ms=0.5)
    assert spans(schedule, costs)["1BW0"] == (5.0, 9.5)
    assert spans(schedule, costs)["0BW0"] == (9.5, 14.0)


def test_stages_of_one_rank_exchange_no_messages() -> None:
    costs = PassCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, message_ms=0.25)
    assert costs.messages_on(Placement.vee(2)) == ((0.0, 0.25), (0.25, 0.0), (0.0, 0.25), (0.25, 0.0))
    assert costs.messages_on(Placement.linear(4)) == ((0.0, 0.25), (0.25, 0.25), (0.25, 0.25), (0.25, 0.0))


@given(st.data(), message_ms)
def test_plans_take_as_long_as_their_schedules(data: st.DataObject, ms: float) -> None:
    """With the ops that send and receive, also of slices: every slice is a message."""
    schedule = data.draw(schedules())
    costs = replace(data.draw(costs_for(schedule)), message_ms=ms)
    assert simulate(plan_of(schedule), costs).spans == simulate(schedule, costs).spans


@given(st.data(), message_ms)
def test_every_pass_has_the_messages_of_its_flow(data: st.DataObject, ms: float) -> None:
    """Counted from the inputs and the consumers of each pass, which the costs are not."""
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    flow, rank_of = schedule.flow, schedule.placement.stage_to_rank
    timeline = simulate(schedule, replace(costs, message_ms=ms))
    for p, start, end in (span for row in timeline.spans for span in row):
        received = sum(rank_of[value.producer.stage] != rank_of[p.stage] for value in flow.inputs(p))
        taken = (other for value in flow.outputs(p) for other in flow.consumers(value))
        sent = sum(rank_of[other.stage] != rank_of[p.stage] for other in taken)
        assert end - start == pytest.approx(costs.duration(p, schedule.slices) + ms * (received + sent))
        assert timeline.message_ends(p) == (ms * received, ms * sent)


@given(st.data(), message_ms)
def test_the_loops_of_the_search_agree_with_the_simulation(data: st.DataObject, ms: float) -> None:
    """Compiled and in Python, to the last bit."""
    schedule = data.draw(schedules().filter(lambda one: one.num_slices == 1 and any(p.kind is W for p in one.passes())))
    costs = replace(data.draw(costs_for(schedule)), message_ms=ms)
    memory = PassMemory.uniform(schedule.placement)
    planned, fast = simulate(schedule, costs, memory), timed(schedule, costs, memory)
    assert (fast.spans, fast.messages, fast.work_ms) == (planned.spans, planned.messages, planned.work_ms)
    limit = (math.inf,) * schedule.num_ranks
    problem = Problem.of(Workload(schedule.placement, schedule.num_microbatches), costs, memory, limit, "makespan")
    if any(p.kind not in (F, B, W) for p in schedule.passes()):
        return
    for loop in (loops(problem), Reference(problem)):
        assert loop.evaluate(loop.pack(problem.rows(schedule)))[0] == planned.makespan_ms


@settings(max_examples=15)
@given(st.integers(0, 10**6), message_ms, st.sampled_from(["span", "makespan"]), st.booleans())
def test_no_schedule_is_shorter_than_the_bound(seed: int, ms: float, objective: Metric, fused: bool) -> None:
    rng = random.Random(seed)
    instance = random_instance(rng, most_ranks=4, most_microbatches=6)
    instance = replace(instance, costs=replace(instance.costs, message_ms=ms))
    schedule = random_schedule(rng, instance, fused)
    peak = peak_memory(schedule, instance)
    bound = lower_bound(
        instance.costs, instance.memory, Workload(instance.placement, instance.num_microbatches), peak, objective, fused
    )
    timeline = simulate(schedule, instance.costs)
    length = timeline.span_ms if objective == "span" else timeline.makespan_ms
    assert bound.value_ms <= length * (1 + 1e-9)


@given(st.data(), message_ms)
def test_no_schedule_of_slices_is_shorter_than_the_bound(data: st.DataObject, ms: float) -> None:
    schedule = data.draw(schedules().filter(lambda one: one.num_slices > 1))
    costs = replace(data.draw(costs_for(schedule)), message_ms=ms)
    on, m = schedule.placement, schedule.num_microbatches
    bound = lower_bound(costs, PassMemory.uniform(on), Workload(on, m, schedule.slices), None, "span")
    assert bound.value_ms <= simulate(schedule, costs).span_ms * (1 + 1e-9)


def test_the_bound_counts_messages() -> None:
    """On the middle rank, each of 8 microbatches exchanges 4 messages: ZB-H2 without waits takes no less."""
    on = Placement.linear(3)
    costs = PassCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, message_ms=0.5)
    bound = lower_bound(costs, PassMemory.uniform(on), Workload(on, 8), None, "span")
    assert bound.value_ms >= 8 * (3 + 4 * 0.5)


def test_the_search_prefers_fewer_messages_when_they_are_expensive() -> None:
    def found(ms: float) -> Schedule:
        costs = PassCosts.uniform(Placement.linear(4), 10, 10, 10)
        memory = PassMemory.uniform(Placement.linear(4))
        return zb_auto(replace(costs, message_ms=ms), memory, 4, 8, 4.0, placement="auto", objective="span")

    assert found(0.0).placement == Placement.vee(4)
    assert found(2.0).placement == Placement.linear(4)


def test_files_and_conversions_keep_it() -> None:
    costs = PassCosts((1.0,) * 4, (2.0,) * 4, (3.0,) * 4, 0.5, message_ms=0.25)
    assert CostsFile.parse(costs_to_json(costs)).on(Placement.linear(4))[0] == costs
    assert "message_ms" not in costs_to_json(replace(costs, message_ms=0.0))
    assert costs.fit(Placement.linear(2)).message_ms == 0.25
    layers = LayerCosts((LayerFigures(1.0, 2.0, 3.0, 1.0, 1.0),) * 4, message_ms=0.25)
    assert layers.on((2, 2))[0].message_ms == 0.25
    text = '{"layers": ["a*4"], "message_ms": 0.25, "parts": {"a": {"forward_ms": 1, "backward_ms": 1, "wgrad_ms": 1}}}'
    assert CostsFile.parse(text).on(Placement.linear(2))[0].message_ms == 0.25
    of_stages = costs_to_json(costs).replace("{", '{"layers_per_stage": [2, 2, 2, 2],', 1)
    derived = CostsFile.parse(of_stages).layer_costs()
    assert derived is not None and derived.message_ms == 0.25


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "1"])
def test_wrong_figures_are_refused(wrong: object) -> None:
    with pytest.raises(UserError, match="message_ms must be a finite number, 0 or above"):
        PassCosts((1.0,), (1.0,), (1.0,), message_ms=wrong)  # type: ignore[arg-type]


def test_weight_gradients_exchange_no_messages() -> None:
    costs = PassCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, message_ms=9.0)
    timeline = simulate(build("zb-h1", num_ranks=2, num_microbatches=1), costs)
    assert timeline.message_ends(Pass(0, W, 0)) == (0.0, 0.0)
