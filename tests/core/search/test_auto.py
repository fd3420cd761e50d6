"""Tests of zb-auto: valid with any costs, within the limit, and never worse than handcrafted schedules."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search import fit, zb_auto
from megatron.zero_bubble.planning.job.runnable import check_runnable
from tests.helpers.rows import some

PUBLISHED = Path(__file__).parents[3] / "configs/published/zero_bubble_table5.csv"
HIDDEN_SIZE_AND_HEADS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}

milliseconds = st.floats(1.0, 50.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from(["linear", "vee", "auto"]), st.data())
def test_zb_auto_is_valid_within_the_limit_or_names_the_least_limit(p: int, m: int, placement: str, data) -> None:
    finest = Placement.linear(p) if placement == "linear" else Placement.vee(p)
    per_stage = st.lists(milliseconds, min_size=finest.num_stages, max_size=finest.num_stages).map(tuple)
    links = data.draw(st.dictionaries(st.tuples(st.integers(0, p - 1), st.integers(0, p - 1)), st.floats(0, 20)))
    costs = PassCosts(*(data.draw(per_stage) for _ in range(3)), data.draw(st.floats(0, 5)), links)
    kept = data.draw(st.lists(st.floats(0.2, 2.0), min_size=finest.num_stages, max_size=finest.num_stages))
    memory = PassMemory(tuple(kept), tuple(data.draw(st.floats(0.0, 3.0)) * a for a in kept))
    limit = data.draw(st.floats(0.3, 3.0 * p))
    objective = data.draw(st.sampled_from(["span", "makespan"]))
    question = {"placement": placement, "objective": objective, "effort": 0.05}
    try:
        schedule = zb_auto(costs, memory, p, m, limit, **question)
    except ValueError as error:
        least = float(re.search(r"needs ([0-9.e+-]+)", str(error))[1])
        assert limit < least
        schedule, limit = zb_auto(costs, memory, p, m, least * 1.0000001, **question), least
    validate(schedule)
    fitted = memory.fit(schedule.placement)
    assert simulate(schedule, costs.fit(schedule.placement), fitted).makespan_ms > 0
    for rank, row in enumerate(schedule.order):
        now = 0.0
        for done in row:
            now += sum(fitted.changes(done))
            assert now <= limit * (1 + 1e-6), f"rank {rank} exceeds the limit: {now}"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from(["linear", "auto"]), st.data())
def test_zb_auto_is_never_longer_than_1f1b_in_its_memory(p: int, m: int, placement: str, data) -> None:
    """Whatever B leaves for W: with full recomputation, it is many times what F has saved."""

    def figures(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return data.draw(st.one_of(values.map(lambda one: (one,) * p), st.tuples(*[values] * p)))

    costs = PassCosts(*(figures(milliseconds) for _ in range(3)), data.draw(st.sampled_from([0.0, 3.0])))
    memory = PassMemory(figures(st.floats(0.5, 2.0)), figures(st.floats(0.0, 20.0)))
    theirs = simulate(build("1f1b", num_ranks=p, num_microbatches=m), costs, memory)
    limit = max(most_kept(theirs, memory))
    for objective in ("span", "makespan"):
        schedule = zb_auto(costs, memory, p, m, limit, placement=placement, objective=objective, effort=0.05)
        validate(schedule)
        check_runnable(schedule, p, m)
        own = costs.fit(schedule.placement), memory.fit(schedule.placement)
        ours = simulate(schedule, *own)
        assert getattr(ours, f"{objective}_ms") <= getattr(theirs, f"{objective}_ms") * (1 + 1e-9)
        assert max(most_kept(ours, own[1])) <= limit * (1 + 1e-6)


@pytest.mark.parametrize(
    ("p", "m", "wgrad", "limit", "placement", "longest_ms", "shares"),
    [
        (4, 12, 8.0, 4.0, "linear", 600, (1, 1)),  # no B fits: 1F1B is optimal
        (4, 12, 8.0, 4.0, "auto", 555, (0, 1)),  # below 570, the bound for fused backwards only
        (8, 32, 12.0, 8.0, "auto", 1455, (0, 1)),  # 1F1B takes 1560
        (16, 64, 12.0, 16.0, "linear", 3050, (0, 1)),  # the last ranks split; 1F1B takes 3160
        (8, 32, 1.0, 8.0, "auto", 1350, (0, 0)),
    ],
)
def test_zb_auto_fuses_where_w_does_not_fit(
    p: int, m: int, wgrad: float, limit: float, placement: str, longest_ms: float, shares: tuple[int, int]
) -> None:
    on = Placement.linear(p)
    costs, memory = PassCosts.uniform(on, 10.0, 20.0, 10.0), PassMemory.uniform(on, 1.0, wgrad)
    schedule = zb_auto(costs, memory, p, m, limit, placement=placement, objective="makespan")
    assert simulate(schedule, costs.fit(schedule.placement)).makespan_ms <= longest_ms * (1 + 1e-9)
    fused = sum(work.kind is Kind.BW for work in schedule.passes()) / (m * schedule.num_stages)
    assert fused == shares[0] if shares[0] == shares[1] else shares[0] < fused < shares[1]


def test_1f1b_is_proved_optimal_where_no_backward_can_be_split() -> None:
    on = Placement.linear(4)
    costs, memory = PassCosts.uniform(on, 10.0, 20.0, 10.0), PassMemory.uniform(on, 1.0, 8.0)
    for objective in ("span", "makespan"):
        assert lower_bound(costs, memory, Workload(on, 12), 4.0, objective).gap(600.0) == 0.0
        assert lower_bound(costs, memory, Workload(on, 12), 8.0, objective).gap(600.0) > 0.1


def published_rows() -> list[dict[str, str]]:
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "row", some(published_rows(), *published_rows()[::8]), ids=lambda row: f"{row['model']}-{row['m']}"
)
def test_zb_auto_is_never_worse_than_the_papers_search(row: dict[str, str], times: int) -> None:
    """Compare with ZB-1p and ZB-2p, with the paper's formulas for M_B and M_W; at 1p the plan is provably optimal."""
    p, m = int(row["p"]), int(row["m"])
    placement = Placement.linear(p)
    costs = PassCosts.uniform(placement, *(float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms")))
    h, heads = HIDDEN_SIZE_AND_HEADS[row["model"]]
    memory = PassMemory.uniform(placement, 34 * h + 5 * heads * 1024, 32 * h)
    limit = times * p * memory.activation[0]
    timeline = simulate(zb_auto(costs, memory, p, m, limit, placement="linear"), costs, memory)
    assert max(timeline.peak_activation) * memory.activation[0] <= limit * (1 + 1e-6)
    assert timeline.bubble_rate("span") <= float(row[f"zb_{times}p"]) + 5e-5
    if times == 1:
        assert lower_bound(costs, memory, Workload(placement, m), limit).gap(timeline.span_ms) == 0.0


@pytest.mark.parametrize(("name", "limit"), [("zb-h1", 4.0), ("zb-h2", 7.0)])
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_zb_auto_is_never_worse_than_handcrafted_schedules_with_equal_memory(
    name: str, limit: float, objective: str
) -> None:
    placement = Placement.linear(4)
    costs = PassCosts.uniform(placement, 18.522, 18.086, 9.337, 0.601)
    ours = zb_auto(costs, PassMemory.uniform(placement), 4, 12, limit, placement="linear", objective=objective)
    theirs = build(name, num_ranks=4, num_microbatches=12)
    figures = [getattr(simulate(schedule, costs), f"{objective}_ms") for schedule in (ours, theirs)]
    assert figures[0] <= figures[1] + 1e-6


def test_too_low_limit_names_the_least_limit() -> None:
    placement = Placement.linear(2)
    costs, memory = PassCosts.uniform(placement, 1, 1, 1), PassMemory.uniform(placement)
    with pytest.raises(ValueError, match="needs 1 on the fullest rank"):
        zb_auto(costs, memory, 2, 4, 0.5, placement="linear")


def test_zb_auto_is_deterministic() -> None:
    placement = Placement.vee(2)
    costs, memory = PassCosts.uniform(placement, 3, 4, 2, 0.5), PassMemory.uniform(placement)
    assert zb_auto(costs, memory, 2, 6, 2.0) == zb_auto(costs, memory, 2, 6, 2.0)


def test_zb_auto_is_no_worse_than_its_start() -> None:
    """Uses almost no search effort."""
    placement = Placement.linear(4)
    costs, memory = PassCosts.uniform(placement, 10.0, 11.0, 7.0, 0.5), PassMemory.uniform(placement, 1.0, 0.5)
    known = zb_auto(costs, memory, 4, 12, 6.0, placement="linear")
    alone = zb_auto(costs, memory, 4, 12, 6.0, placement="linear", effort=1e-6)
    started = zb_auto(costs, memory, 4, 12, 6.0, placement="linear", effort=1e-6, start=known)
    spans = [simulate(schedule, costs).span_ms for schedule in (known, started, alone)]
    assert spans[1] <= spans[0] < spans[2]
    elsewhere = zb_auto(costs, memory, 4, 12, 6.0, placement="linear", effort=1e-6, start=build_vee(4, 12))
    assert elsewhere.placement == placement


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_fit_shortens_a_published_schedule_within_its_memory(objective: str) -> None:
    """Times and bytes of a GPT on two CPU ranks, where W takes half as long as B."""
    published = build("zb-v", num_ranks=2, num_microbatches=4)
    costs = PassCosts.uniform(published.placement, 163.0, 198.0, 88.0)
    memory = PassMemory.uniform(published.placement, 3e9, 2e9)
    before = simulate(published, costs, memory)
    fitted = fit(published, costs, memory, objective=objective)
    after = simulate(fitted, costs, memory)
    assert after.makespan_ms < before.makespan_ms
    assert max(most_kept(after, memory)) <= max(most_kept(before, memory))
    assert (fitted.name, fitted.placement) == (published.name, published.placement)


def build_vee(p: int, m: int):
    costs, memory = PassCosts.uniform(Placement.vee(p), 1.0, 1.0, 1.0), PassMemory.uniform(Placement.vee(p), 1.0, 1.0)
    return zb_auto(costs, memory, p, m, float(p), placement="vee", effort=1e-6)
