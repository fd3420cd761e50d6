"""Which placements a choice stands for, and the search on loops and waves."""

from __future__ import annotations

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate, validate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.placements import placements
from megatron.zero_bubble.core.search.problem import Problem
from megatron.zero_bubble.core.search.units import breadth_first, grouped, interleaved, zero_pp

LINE, VEE = Placement.linear(3), Placement.vee(3)
LOOP, WAVE = Placement.interleaved, Placement.wave


@pytest.mark.parametrize(
    ("choice", "num_chunks", "expected"),
    [
        ("linear", None, [LINE]),
        ("vee", 2, [VEE]),
        ("auto", None, [LINE, VEE]),
        ("auto", 4, [LINE, VEE, LOOP(3, 4), WAVE(3, 4)]),
        ("auto", 3, [LINE, VEE, LOOP(3, 3)]),
        ("auto", "auto", [LINE, VEE, LOOP(3, 2), LOOP(3, 3), LOOP(3, 4), WAVE(3, 4), WAVE(3, 6)]),
        ("loop", 4, [LOOP(3, 4)]),
        ("wave", 4, [WAVE(3, 4)]),
        ("loop", None, [LOOP(3, 2), LOOP(3, 3), LOOP(3, 4)]),
        ("wave", "auto", [VEE, WAVE(3, 4), WAVE(3, 6)]),
    ],
)
def test_a_choice_stands_for_placements(choice: str, num_chunks: object, expected: list[Placement]) -> None:
    assert list(placements(choice, 3, num_chunks)) == expected


@pytest.mark.parametrize(("choice", "num_chunks"), [("linear", 2), ("vee", 4), ("wave", 3), ("loop", 0)])
def test_a_number_of_stages_that_a_placement_cannot_have_is_refused(choice: str, num_chunks: int) -> None:
    with pytest.raises(UserError, match=str(num_chunks)):
        placements(choice, 3, num_chunks)


def problem(p: int, m: int, v: int) -> Problem:
    on = Placement.interleaved(p, v)
    costs, memory = PassCosts.uniform(on, 3.0, 4.0, 2.0), PassMemory.uniform(on)
    return Problem.of(Workload(on, m), costs, memory, (float(m),) * p, "span")


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (3, 7, 3), (5, 3, 4), (4, 9, 2), (1, 2, 2)])
def test_units_are_the_orders_of_the_schedules_by_name(p: int, m: int, v: int) -> None:
    on = problem(p, m, v)
    named = {
        "interleaved-1f1b": interleaved(on),
        "gis": grouped(on, p),
        "gis-h": grouped(on, (p + 1) // 2),
        "zero-pp": zero_pp(on),
        "breadth-first": breadth_first(on),
    }
    for name, rows in named.items():
        assert rows == on.rows(build(name, num_ranks=p, num_microbatches=m, num_chunks=v)), name


@pytest.mark.parametrize("name", ["interleaved-1f1b", "gis", "gis-h", "zero-pp", "breadth-first"])
@pytest.mark.parametrize(("p", "m", "v"), [(3, 2, 3), (4, 9, 4)])
def test_zb_auto_is_never_longer_than_a_schedule_by_name_in_its_memory(name: str, p: int, m: int, v: int) -> None:
    line = Placement.linear(p)
    costs, memory = PassCosts.uniform(line, 12.0, 14.0, 9.0, 0.2), PassMemory.uniform(line, 1.0, 0.6)
    theirs = build(name, num_ranks=p, num_microbatches=m, num_chunks=v)
    on = theirs.placement
    known = simulate(theirs, costs.fit(on), memory.fit(on))
    limit = max(most_kept(known, memory.fit(on)))
    for objective in ("span", "makespan"):
        ours = zb_auto(costs, memory, p, m, limit, placement="loop", num_chunks=v, objective=objective, effort=0.02)
        validate(ours)
        timeline = simulate(ours, costs.fit(on), memory.fit(on))
        assert getattr(timeline, f"{objective}_ms") <= getattr(known, f"{objective}_ms") * (1 + 1e-9)
        assert max(most_kept(timeline, memory.fit(on))) <= limit * (1 + 1e-6)


@pytest.mark.parametrize(
    ("p", "times", "placement", "num_chunks", "longest_ms"),
    [
        (4, (12.0, 12.0, 12.0), "loop", 4, 156.7),
        (4, (12.0, 12.0, 12.0), "wave", 4, 156.0),
        (4, (12.0, 12.0, 12.0), "auto", "auto", 154.3),
        (8, (12.0, 14.0, 9.0), "loop", 4, 315.2),
        (8, (12.0, 14.0, 9.0), "wave", 4, 311.6),
    ],
)
def test_few_microbatches_take_as_long_as_an_exact_solver_found(
    p: int, times: tuple[float, float, float], placement: str, num_chunks: object, longest_ms: float
) -> None:
    """The optima are 156.6 and 156.0, and six stages in a wave 154.2; 315.1, and 311.5 to 312.1."""
    line = Placement.linear(p)
    costs, memory = PassCosts.uniform(line, *times, 0.2), PassMemory.uniform(line)
    plan = zb_auto(costs, memory, p, p, p, placement=placement, num_chunks=num_chunks, objective="makespan")
    assert simulate(plan, costs.fit(plan.placement)).makespan_ms <= longest_ms


def test_more_choices_never_change_a_plan_that_is_shorter_without_them() -> None:
    """With slow transfers, three stages per rank take longer: 164.7 ms instead of 157.5."""
    line = Placement.linear(3)
    costs, memory = PassCosts.uniform(line, 13.2, 14.5, 14.0, 3.0), PassMemory.uniform(line, 1.0, 0.6)
    question = {"objective": "makespan", "effort": 0.1}
    plan = zb_auto(costs, memory, 3, 3, 3.0, **question)
    assert zb_auto(costs, memory, 3, 3, 3.0, num_chunks=3, **question) == plan
    assert zb_auto(costs, memory, 3, 3, 3.0, num_chunks="auto", **question) == plan


def test_figures_of_each_placement_decide_which_are_searched() -> None:
    line = Placement.linear(2)
    costs, memory = PassCosts.uniform(line, 3.0, 4.0, 2.0), PassMemory.uniform(line)

    def figures(on: Placement) -> tuple[PassCosts, PassMemory]:
        if on.num_stages != 6:
            raise UserError("the model has six layers")
        return costs.fit(on), memory.fit(on)

    plan = zb_auto(costs, memory, 2, 2, 2.0, num_chunks="auto", figures=figures, effort=0.01)
    assert plan.placement == Placement.interleaved(2, 3)


def test_a_loop_of_two_stages_is_searched_as_a_loop_with_little_effort() -> None:
    """The seeds are tried on fewer ranks first; on one rank, a loop of two stages would be a V."""
    line = Placement.linear(6)
    costs, memory = PassCosts.uniform(line, 3.0, 4.0, 2.0, 0.1), PassMemory.uniform(line)
    plan = zb_auto(costs, memory, 6, 20, 9.0, placement="loop", num_chunks=2, effort=0.003)
    validate(plan)
    assert plan.placement == Placement.interleaved(6, 2)
