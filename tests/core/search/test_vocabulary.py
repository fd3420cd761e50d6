"""Vocabulary passes inserted into schedules: valid orders, published lengths, and memory."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import (
    Kind,
    Pass,
    PassCosts,
    PassMemory,
    Placement,
    Schedule,
    Timeline,
    build,
    simulate,
    validate,
)
from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.analysis.score import SHORTEST, Goal
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of
from megatron.zero_bubble.core.plan import lower, prove
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.core.search.vocabulary import best_with_vocabulary, forwards_ahead, with_vocabulary
from tests.helpers.plans import schedule_from_json
from tests.helpers.rows import some
from tests.helpers.strategies import costs_for

NAMES = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-1f1b", "dualpipe-v"]
TABLE_5 = Path(__file__).parents[3] / "configs" / "published" / "zero_bubble_table5.csv"


def unit_costs(schedule: Schedule, shard_ms: float = 0.25) -> PassCosts:
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    return replace(costs, vocabulary=VocabularyCosts.uniform(schedule.num_ranks, shard_ms, shard_ms))


def best_timeline(
    schedule: Schedule, costs: PassCosts, memory: PassMemory, algorithm: Algorithm, goal: Goal = SHORTEST
) -> Timeline:
    return simulate(best_with_vocabulary(schedule, costs, memory, algorithm, goal), costs, memory)


@given(
    data=st.data(),
    name=st.sampled_from(NAMES),
    p=st.integers(1, 5),
    m=st.integers(1, 7),
    algorithm=st.sampled_from([1, 2]),
    lag=st.floats(0.0, 2.0),
)
def test_every_schedule_gets_vocabulary_passes(
    data: st.DataObject, name: str, p: int, m: int, algorithm: Algorithm, lag: float
) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    clock = data.draw(costs_for(schedule))
    for delay in (False, True) if schedule.num_stages == p else (True,):
        made = with_vocabulary(schedule, clock, algorithm, lag, delay)
        validate(made)
        assert algorithm_of(made) == algorithm
        counts = Counter(q.kind for q in made.passes())
        assert [counts[kind] for kind in (Kind.S, Kind.T, Kind.I, Kind.J, Kind.L)] == [p * m] * 4 + [m]
        prove(lower(made))
        evaluation = made.forward_only()
        validate(evaluation, forward_only=True)
        kinds = {Kind.F, Kind.S, Kind.I, Kind.L}
        assert {q.kind for q in evaluation.passes()} == kinds
        prove(lower(evaluation))


@pytest.mark.parametrize("p", [2, 4, 8, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_1f1b_keeps_its_bubble(p: int, rounds: int, algorithm: Algorithm) -> None:
    """The bubble is at most that of 1F1B, for one microbatch of memory per barrier; the schedules of arXiv 2411.05288
    need 0.75 units more with one barrier, and 2 to 2.5 units with two.
    """
    schedule = build("1f1b", num_ranks=p, num_microbatches=rounds * p)
    timeline = best_timeline(schedule, unit_costs(schedule), PassMemory.uniform(schedule.placement), algorithm)
    assert timeline.makespan_ms - rounds * p * 3.5 <= 3 * (p - 1) + 1e-9
    assert max(timeline.peak_activation) == p + (1 if algorithm == 2 else 2)


@pytest.mark.parametrize("p", [4, 8, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("rounds", [4, 8])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_zb_h1_keeps_its_bubble(p: int, rounds: int, algorithm: Algorithm) -> None:
    schedule = build("zb-h1", num_ranks=p, num_microbatches=rounds * p)
    timeline = best_timeline(schedule, unit_costs(schedule), PassMemory.uniform(schedule.placement), algorithm)
    assert timeline.makespan_ms - rounds * p * 3.5 <= p - 1 + 1e-9
    assert max(timeline.peak_activation) == p + (1 if algorithm == 2 else 2)


# Bubbles in ms of ZB-H1 with S + T = 0.1, 0.25 and 0.4 of F + B + W, from an independent simulation.
CELLS = {
    ("1.5B", 24): (200.6, 197.2, 193.7),
    ("1.5B", 64): (204.2, 200.7, 197.3),
    ("6.2B", 32): (285.5, 279.6, 279.2),
    ("14.6B", 48): (232.0, 230.3, 230.3),
}


@pytest.mark.parametrize("model, m", some(CELLS, ("1.5B", 24), ("6.2B", 32)))
def test_zb_h1_with_published_times_is_never_longer_than_without_vocabulary(model: str, m: int) -> None:
    lines = [line for line in TABLE_5.read_text().splitlines() if not line.startswith("#")]
    (row,) = [row for row in csv.DictReader(lines) if (row["model"], row["m"]) == (model, str(m))]
    p, (f, b, w, comm) = int(row["p"]), (float(row[f"t_{key}_ms"]) for key in ("f", "b", "w", "comm"))
    schedule = build("zb-h1", num_ranks=p, num_microbatches=m)
    plain = PassCosts.uniform(schedule.placement, f, b, w, comm)
    without = simulate(schedule, plain).makespan_ms - m * (f + b + w)
    for share, known in zip((0.1, 0.25, 0.4), CELLS[model, m], strict=True):
        half = share * (f + b + w) / 2
        costs = replace(plain, vocabulary=VocabularyCosts.uniform(p, half, half))
        timeline = best_timeline(schedule, costs, PassMemory.uniform(schedule.placement), 2)
        bubble = timeline.makespan_ms - m * (f + b + w + 2 * half)
        assert bubble <= known + 0.05 < without
        assert max(timeline.peak_activation) == p + 1


def test_forwards_move_ahead_by_one_microbatch() -> None:
    schedule = forwards_ahead(build("1f1b", num_ranks=2, num_microbatches=3), 1)
    assert [" ".join(row) for row in schedule.to_text()] == [
        "0F0 0F1 0F2 0BW0 0BW1 0BW2",
        "1F0 1F1 1BW0 1F2 1BW1 1BW2",
    ]


def test_logits_count_from_s_to_t() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=4)
    costs = unit_costs(schedule)
    memory = replace(PassMemory.uniform(schedule.placement), logits=(0.5, 0.5))
    peaks = [
        max(simulate(with_vocabulary(schedule, costs, 2, lag), costs, memory).peak_activation) for lag in (0.0, 2.0)
    ]
    assert peaks[0] < peaks[1]
    within = best_timeline(schedule, costs, memory, 2, Goal(limit=peaks[0]))
    assert max(within.peak_activation) <= peaks[0]


def test_collectives_delay_what_waits_for_them() -> None:
    """With one microbatch, all wait for tokens, rows, hidden states, losses, factors, and the gradient of rows; with
    algorithm 1 also for the gradient of the hidden states.
    """
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    costs = unit_costs(schedule)
    slower = replace(costs, vocabulary=VocabularyCosts.uniform(2, 0.25, 0.25, collective_ms=1000.0))
    numbers: tuple[tuple[Algorithm, int], ...] = ((1, 7), (2, 6))
    for algorithm, collectives in numbers:
        made = with_vocabulary(schedule, costs, algorithm)
        delay = simulate(made, slower).makespan_ms - simulate(made, costs).makespan_ms
        assert round(delay / 1000, 1) == collectives


@pytest.mark.parametrize("algorithm", [1, 2])
def test_plan_file_keeps_the_vocabulary(algorithm: Algorithm) -> None:
    schedule = build("zb-v", num_ranks=3, num_microbatches=4)
    costs = unit_costs(schedule)
    made = with_vocabulary(schedule, costs, algorithm, delay=True)
    read = schedule_from_json(plan_to_json(simulate(made, costs)))
    assert read == made


def test_missing_pass_is_rejected() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=2)
    made = with_vocabulary(schedule, unit_costs(schedule), 2)
    for missing in (Pass(1, Kind.S, 1), Pass(0, Kind.T, 0), Pass(1, Kind.L, 1), Pass(0, Kind.I, 0), Pass(1, Kind.J, 1)):
        order = tuple(tuple(p for p in row if p != missing) for row in made.order)
        with pytest.raises(ScheduleError, match=f"must run {missing}; it is missing"):
            validate(replace(made, order=order))


def test_unsuitable_schedules_are_refused() -> None:
    sliced = build("seq-zb-h1", num_ranks=2, num_microbatches=2, num_slices=2)
    with pytest.raises(UserError, match="does not support sequence slices; got 2 slices"):
        with_vocabulary(sliced, unit_costs(sliced), 2)
    turned = replace(build("zb-h1", num_ranks=2, num_microbatches=1), placement=Placement((1, 0)))
    with pytest.raises(UserError, match="stage r must be on rank r"):
        with_vocabulary(turned, unit_costs(turned), 2)
    plain = build("zb-h1", num_ranks=2, num_microbatches=1)
    without = PassCosts.uniform(plain.placement, 1.0, 1.0, 1.0)
    with pytest.raises(UserError, match="needs their times, and the costs have none"):
        simulate(with_vocabulary(plain, without, 2), without)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_vocabulary_passes_fit_a_plan_on_a_wave(algorithm: Algorithm) -> None:
    """Eight stages in a W: the last one is on the first rank."""
    on = Placement.wave(2, 4)
    costs, memory = PassCosts.uniform(on, 3.0, 4.0, 2.0, 0.1), PassMemory.uniform(on)
    plan = zb_auto(costs, memory, 2, 3, 3.0, placement="wave", num_chunks=4, effort=0.01)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(2, 0.25, 0.25))
    found = best_with_vocabulary(plan, costs, memory, algorithm)
    validate(found)
    prove(lower(found))
    assert found.placement == on
