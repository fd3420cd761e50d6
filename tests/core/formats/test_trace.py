"""Tests of recorded iterations as JSON: keys, round trip, and errors in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.trace import RankTrace, Settled, Trace, ValidationWait
from megatron.zero_bubble.core.costs.lengths import Load, PackedCosts
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.trace import Recording, read_trace_file, trace_from_json, trace_to_json
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.delayed import run
from tests.helpers.strategies import schedules

SCHEDULE = build("zb-h1", num_ranks=2, num_microbatches=2)
COSTS = PassCosts.uniform(SCHEDULE.placement, 10, 10, 10, 1)
MEMORY = PassMemory.uniform(SCHEDULE.placement, 64e6, 16e6)


def recording(schedule: Schedule = SCHEDULE) -> Recording:
    """Return a recording of three iterations, the first of them the slowest, with one event of every kind."""
    costs = PassCosts.uniform(schedule.placement, 10, 10, 10, 1)
    first = schedule.order[0][0]
    traces = {number: run(schedule, costs, slow={first: late}) for number, late in ((7, 9.0), (8, 0.0), (12, 4.0))}
    head, *rest = traces[7].ranks
    more = RankTrace(
        head.spans, head.sends, head.receives, (Settled(first, 1, 1.0, 2.0),), (ValidationWait(3, 3.5),), 0.25
    )
    traces[7] = Trace(traces[7].timeline, (more, *rest))
    return Recording(costs, traces, PassMemory.uniform(schedule.placement, 64e6, 16e6))


def test_json_keys_are_exactly_the_documented_ones() -> None:
    content = json.loads(trace_to_json(recording()))
    assert list(content) == [
        "format", "schedule", "num_ranks", "num_microbatches", "forward_ms", "backward_ms", "wgrad_ms", "comm_ms",
        "activation", "wgrad", "planned", "measured", "iterations",
    ]  # fmt: skip
    assert content["format"] == 1
    assert list(content["iterations"][0]) == ["iteration", "ranks"]
    rank = content["iterations"][0]["ranks"][0]
    assert list(rank) == ["clock_error_ms", "passes", "sends", "receives", "settles", "validations"]
    assert rank["passes"][0] == ["0F0", 0.0, 19.0]
    assert rank["sends"][0] == ["0F0", 1, 19.0]
    assert content["iterations"][0]["ranks"][1]["receives"][0] == ["0F0", 0, 0.0, 0.0, 20.0]
    assert rank["settles"] == [["0F0", 1, 1.0, 2.0]]
    assert rank["validations"] == [[3, 3.5]]


def test_summary_figures_are_of_the_typical_iteration() -> None:
    content = json.loads(trace_to_json(recording()))
    assert recording().typical == 12
    assert content["measured"]["makespan_ms"] - content["planned"]["makespan_ms"] == pytest.approx(4.0)
    rates = [trace.timeline.bubble_rate("makespan") for trace in recording().traces.values()]
    assert content["measured"]["bubble_rate_makespan"] == sorted(rates)[1]


@given(schedules())
def test_round_trip(schedule: Schedule) -> None:
    read = trace_from_json(trace_to_json(recording(schedule)))
    # The times of slices need not be whole numbers, so the file has them rounded.
    assert read == recording(schedule) or schedule.num_slices > 1
    assert read.costs == recording(schedule).costs
    assert read.traces[7].timeline.schedule.slices == schedule.slices


def test_times_are_rounded_to_a_tenth_of_a_microsecond() -> None:
    slow = {SCHEDULE.order[0][0]: 1.23456789}
    read = trace_from_json(trace_to_json(Recording(COSTS, {1: run(SCHEDULE, COSTS, slow=slow)})))
    assert read.traces[1].timeline.spans[0][0].end_ms == 11.2346


def test_loads_of_microbatches_are_read_as_they_were_written() -> None:
    """The plan of an iteration has the times of its loads: the second microbatch takes half as long as the first."""
    loads = (Load.of([64]), Load.of([20, 12]))
    costs = PackedCosts(**vars(COSTS), sequence=64, loads=loads)
    written = Recording(COSTS, {1: run(SCHEDULE, costs).with_loads(loads)}, MEMORY, sequence=64)
    content = json.loads(trace_to_json(written))
    assert content["sequence_tokens"] == 64
    assert content["iterations"][0]["loads"] == [[64, 4096], [32, 544]]
    read = trace_from_json(trace_to_json(written))
    assert read == written
    planned = read.compared(1).planned
    assert planned.makespan_ms == simulate(SCHEDULE, costs).makespan_ms < simulate(SCHEDULE, COSTS).makespan_ms
    assert content["planned"]["makespan_ms"] == planned.makespan_ms
    content["iterations"][0]["loads"].pop()
    with pytest.raises(UserError, match="one load per microbatch; got 1 for 2"):
        trace_from_json(json.dumps(content))
    content["iterations"][0]["loads"] = [[64, 0.5]]
    with pytest.raises(UserError, match="a list of pairs of whole numbers"):
        trace_from_json(json.dumps(content))


def test_memory_is_optional() -> None:
    known = recording()
    assert trace_from_json(trace_to_json(Recording(known.costs, known.traces))).memory is None


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(trace_to_json(recording()))
    edit(content)
    return json.dumps(content)


def rank_of(content: dict[str, Any]) -> dict[str, Any]:
    rank: dict[str, Any] = content["iterations"][0]["ranks"][1]
    return rank


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format=2), "format must be 1, the only format that this version reads; got 2"),
        (lambda c: c.update(num_slices=2), "num_slices must agree with the order, which has 1; got 2"),
        (lambda c: c.update(format=True), "format must be 1, the only format that this version reads; got true"),
        (
            lambda c: c.pop("format"),
            "it must have the key format, 1, the only format that this version reads; it is mi",
        ),
        (lambda c: c.update(iterations=[]), r"iterations must be a list of at least one iteration; got \[\]"),
        (lambda c: c.update(iterations=[1]), "every iteration must be an object; got 1"),
        (lambda c: c["iterations"][0].update(iteration="7"), 'iteration must be a whole number; got "7"'),
        (
            lambda c: c["iterations"][2].update(iteration=7),
            "iteration numbers must be unique; got 7 twice; remove one of them",
        ),
        (lambda c: c["iterations"][0].update(ranks=[]), "ranks must be a list of at least one rank"),
        (lambda c: c["iterations"][0].update(ranks=[[]]), r"iteration 7, rank 0 must be an object; got \[\]"),
        (lambda c: rank_of(c).pop("sends"), r"it must have the key sends, a list of rows \[pass, rank, sent\]"),
        (
            lambda c: rank_of(c).update(sends=[["0F0", 1]]),
            r'sends of iteration 7, rank 1 must be rows \[pass, rank, sent\]; got \["0F0", 1\]',
        ),
        (
            lambda c: rank_of(c)["passes"].insert(0, ["F0", 0, 1]),
            "a pass is written <stage><F|B|W|BW><microbatch>",
        ),
        (
            lambda c: rank_of(c)["passes"].insert(0, [3, 0, 1]),
            'passes of iteration 7, rank 1 must give pass as a pass such as "2F0"; got 3',
        ),
        (
            lambda c: rank_of(c).update(receives=[["0F0", -1, 1, 1, 1]]),
            "receives of iteration 7, rank 1 must give rank as a rank; got -1",
        ),
        (
            lambda c: rank_of(c).update(validations=[[0, None]]),
            "validations of iteration 7, rank 1 must give end as ms; got null",
        ),
        (lambda c: rank_of(c).update(passes=[]), "iteration 7, rank 1 must have one or more passes in order .*; got 0"),
        (
            lambda c: rank_of(c)["passes"].reverse(),
            "iteration 7, rank 1 must have one or more passes in order .*; got 6",
        ),
        (lambda c: rank_of(c)["passes"].pop(), "1W1"),
        (lambda c: rank_of(c)["passes"][-1].__setitem__(0, "9W1"), "9W1|stage"),
        (lambda c: c.update(forward_ms=[1.0]), "every list must have one figure per stage"),
        (lambda c: c.update(comm_ms=10**400), "comm_ms must be a number; got 10000"),
        (lambda c: c.update(comm_ms=float("nan")), "comm_ms must be a number; got NaN"),
        (lambda c: c.update(comm_ms=True), "comm_ms must be a number; got true"),
        (lambda c: rank_of(c)["sends"][0].__setitem__(2, 10**400), "sends of .* must give sent as ms; got 10000"),
        (lambda c: c.update(comm_ms="1"), 'comm_ms must be a number; got "1"'),
        (lambda c: c.pop("wgrad"), "it must have the key wgrad, a list of numbers, one per stage; it is missing"),
        (lambda c: c.update(activation=[1.0], wgrad=[1.0]), "memory must have one figure per stage"),
    ],
)
def test_invalid_content_is_rejected(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        trace_from_json(edited(edit))
    assert isinstance(raised.value, ValueError)


def test_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(ValueError, match=r"trace file .*trace\.json: it must be a JSON object; got '\[\]'"):
        read_trace_file(tmp_path / "trace.json")


def test_passes_are_parsed() -> None:
    assert trace_from_json(trace_to_json(recording())).traces[8].timeline.spans[0][0].pass_ == Pass.parse("0F0")


@pytest.mark.parametrize("algorithm", [1, 2])
def test_divided_vocabulary_is_read_as_it_was_written(algorithm: Algorithm) -> None:
    """With its costs, its memory, and the collectives on their lanes."""
    costs = replace(COSTS, vocabulary=VocabularyCosts((3.0, 2.0), (1.0, 2.0), (0.5, 0.25), (0.25, 0.5), 20.0))
    memory = replace(PassMemory.uniform(SCHEDULE.placement, 64e6, 16e6), logits=(5e6, 6e6))
    plan = plan_of(with_vocabulary(SCHEDULE, costs, algorithm, delay=True))
    planned = simulate(plan, costs)
    rows = tuple(map(RankTrace, planned.spans))
    rows = tuple(replace(row, lanes=lanes) for row, lanes in zip(rows, planned.lanes, strict=True))
    trace = Trace.of("zb-h1", rows, make_flow=plan.schedule.make_flow)
    written = Recording(costs, {3: trace}, memory)
    text = trace_to_json(written)
    assert trace_from_json(text) == written
    content = json.loads(text)
    assert content["vocabulary"] == algorithm and content["output_ms"] == [3.0, 2.0] and content["logits"] == [5e6, 6e6]
    compared = written.compared(3)
    assert compared.memory is not None
    assert compared.planned.makespan_ms == trace.timeline.makespan_ms  # also waits for the lanes of collectives
    assert compared.difference.makespan_ms == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(UserError, match="the algorithm of its vocabulary passes, 1 or 2"):
        trace_from_json(json.dumps(content | {"vocabulary": 3}))
