"""Pairs: an op that computes a forward and a backward at the same time, in plans, files and drawings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, Placement, Schedule, build, simulate, validate
from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.analysis.memory import peaks
from megatron.zero_bubble.core.analysis.trace import RankTrace, Trace
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.formats.plan import plan_from_json, plan_to_json
from megatron.zero_bubble.core.formats.torch_csv import schedule_to_csv
from megatron.zero_bubble.core.formats.trace import Recording, trace_from_json, trace_to_json
from megatron.zero_bubble.core.ir import Kind, Pair, Pass, Plan
from megatron.zero_bubble.core.ir.ops import parse_op
from megatron.zero_bubble.core.ir.pairs import PAIR_OPS
from megatron.zero_bubble.core.ir.plan import Unrolled
from megatron.zero_bubble.core.ir.repeats import find_repeats
from megatron.zero_bubble.core.plan import communicate, lower, plan_of, prove
from megatron.zero_bubble.core.render.perfetto import render_perfetto
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.core.render.text import render_text
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.planning.job.runnable import check_runnable


def one_stage(num_ranks: int, num_microbatches: int, warmup: Callable[[int], int], pairs: bool = True) -> Schedule:
    """1F1B with this warm-up by rank, and pairs of the F and B of its steady state."""
    order, together = [], set()
    for rank in range(num_ranks):
        ahead = warmup(rank)
        row = [Pass(rank, Kind.F, microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            if microbatch + ahead < num_microbatches:
                row.append(Pass(rank, Kind.F, microbatch + ahead))
                together.add(row[-1])
            row += [Pass(rank, Kind.B, microbatch), Pass(rank, Kind.W, microbatch)]
        order.append(tuple(row))
    own = frozenset(together) if pairs else frozenset()
    return Schedule("one stage", Placement.linear(num_ranks), num_microbatches, tuple(order), pairs=own)


def costs_of(schedule: Schedule) -> PassCosts:
    return PassCosts.uniform(schedule.placement, 3.0, 2.0, 4.0, 0.5)


def test_a_pair_declares_what_both_of_its_passes_do() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=4, pairs=True)
    forward, backward = Pass.parse("3F1"), Pass.parse("3BW0")
    op = Pair(forward, backward)
    assert str(op) == "3F1&3BW0" and parse_op("3F1&3BW0", 1, PAIR_OPS) == op
    assert op.works == (forward, backward) and op.later(2) == Pair(Pass.parse("3F3"), Pass.parse("3BW2"))
    effects, flow = op.effects(schedule.flow), schedule.flow
    assert effects.uses == flow.inputs(forward) + flow.inputs(backward)
    assert effects.gives == flow.outputs(forward) + flow.outputs(backward)
    costs, memory = costs_of(schedule), PassMemory.uniform(schedule.placement, 2.0, 1.0)
    assert op.duration_ms(costs, schedule.slices) == costs.duration(forward) + costs.duration(backward)
    assert op.memory(memory, schedule.slices) == (1.0, -1.0)
    with pytest.raises(UserError, match="a pass is written"):
        parse_op("3F1&", 1, PAIR_OPS)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "dualpipe-v"])
@pytest.mark.parametrize("num_microbatches", [1, 5, 12])
def test_schedules_with_pairs_are_proved_and_simulated(name: str, num_microbatches: int) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=num_microbatches, pairs=True)
    validate(schedule)
    plan = plan_of(schedule)
    pairs = [op for row in plan.ops for op in row if isinstance(op, Pair)]
    assert {op.forward for op in pairs} == schedule.pairs and len(pairs) == len(schedule.pairs)
    assert bool(pairs) == (num_microbatches > 1)
    bare, sent = simulate(schedule, costs_of(schedule)), simulate(plan, costs_of(schedule))
    assert sent.spans == bare.spans
    assert bare.peak_activation == peaks(bare, PassMemory.uniform(schedule.placement))
    assert not schedule.forward_only().pairs and lower(schedule.forward_only())


def test_rows_that_run_in_sequence_but_deadlock_as_pairs_are_refused_with_their_picture() -> None:
    """A warm-up of p-1-r forwards is enough if passes run one after the other; these rows hung for real as pairs."""
    short = one_stage(4, 12, lambda rank: max(1, 3 - rank))
    alone = replace(short, pairs=frozenset())
    prove(communicate(Plan.bare(alone)))
    with pytest.raises(PlanError, match="the ranks wait for each other") as refusal:
        prove(communicate(Plan.bare(short)))
    assert "[2F1&2B0]" in str(refusal.value) and "[3F1&3B0]" in str(refusal.value)
    with pytest.raises(PlanError, match="wait for each other"):
        lower(short)
    with pytest.raises(ScheduleError, match=r"the order deadlocks: .*stops at \dF\d&\dB0, which waits for"):
        validate(short)
    prove(communicate(Plan.bare(one_stage(4, 12, lambda rank: 4 - rank))))


def test_what_is_no_pair_is_refused() -> None:
    schedule = one_stage(2, 4, lambda rank: 2 - rank)
    for first, sentence in (
        ("0B0", "0B0 is followed by 0W0"),
        ("0F0", "0F0 is followed by 0F1"),
        ("1W3", "1W3 is the last pass"),
    ):
        with pytest.raises(ScheduleError, match=f"a pair must be a forward .*{sentence}"):
            validate(replace(schedule, pairs=frozenset({Pass.parse(first)})))
    own = replace(schedule, pairs=frozenset({Pass.parse("1F0")}))  # its backward needs it
    rows = tuple(tuple(sorted(row, key=lambda p: p.microbatch)) for row in own.order)
    with pytest.raises(ScheduleError, match="a pair must be a forward"):
        validate(replace(own, order=rows))
    with pytest.raises(PlanError, match="1F0&1B0 must be a forward"):
        prove(communicate(Plan.bare(replace(own, order=rows))))
    with pytest.raises(UserError, match="schedule 'zb-h1' has no pairs"):
        build("zb-h1", num_ranks=2, num_microbatches=4, pairs=True)


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("one stage", None)]
)
def test_plans_that_repeat_pairs_are_stored_once_and_equal_plans_lowered_in_full(
    name: str, num_chunks: int | None
) -> None:
    if num_chunks is None:
        schedule = one_stage(4, 64, lambda rank: 2 * (4 - rank) - 1)
    else:
        schedule = build(name, num_ranks=4, num_microbatches=64, num_chunks=num_chunks, pairs=True)
    assert find_repeats(schedule) is not None
    plan, whole = lower(schedule), communicate(Plan.bare(schedule))
    assert isinstance(plan.ops, Unrolled) and plan.stem.schedule.num_microbatches < schedule.num_microbatches
    assert tuple(plan.ops) == whole.ops
    prove(whole)
    assert simulate(plan, costs_of(schedule)).spans == simulate(whole, costs_of(schedule)).spans


def test_files_have_pairs() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=6, pairs=True)
    timeline = simulate(schedule, costs_of(schedule))
    text = plan_to_json(timeline)
    assert json.loads(text)["order"][1][:4] == ["1F0", "1F1", "3F0", "3F1&3BW0"]
    assert plan_from_json(text).schedule == schedule
    without = text.replace("&", '", "')  # as a version without pairs wrote it
    assert plan_from_json(without).schedule == replace(schedule, pairs=frozenset())
    with pytest.raises(UserError, match="a pass is written"):
        plan_from_json(text.replace("3F1&3BW0", "3F1&"))
    assert "1F1,3F0,(3F1;3B0)OVERLAP_F_B" in schedule_to_csv(schedule)


def test_drawings_and_traces_show_a_pair_as_one() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=6, pairs=True)
    costs = costs_of(schedule)
    planned = simulate(schedule, costs)
    assert planned.work_ms == pytest.approx(6 * 9.0), "the time of a pair counts once"
    assert "3F1&3BW0" in render_text(planned) and "0F3&2BW0" in render_text(planned)
    low, high = render_svg(replace(planned, schedule=replace(schedule, pairs=frozenset()))), render_svg(planned)
    assert low.count("v22h-") == len([*schedule.passes()])
    assert high.count("v11h-") == 2 * len(schedule.pairs), "above each other in one box"
    trace = Trace.of(schedule.name, tuple(map(RankTrace, planned.spans, *[[()] * 2] * 4)), pairs=schedule.pairs)
    recording = Recording(costs, {1: trace})
    text = trace_to_json(recording)
    assert '["3F1&3BW0", ' in text
    read = trace_from_json(text).traces[1].timeline
    assert read.schedule == schedule
    assert read.spans == planned.spans
    compared: ComparedIteration = recording.compared(1)
    assert compared.planned.spans == planned.spans
    names = {event["name"] for event in json.loads(render_perfetto(compared))["traceEvents"]}
    assert "3F1&3BW0" in names and "3F1" not in names


def test_pairs_are_runnable_and_need_a_handler() -> None:
    schedule = build("interleaved-1f1b", num_ranks=2, num_microbatches=4, pairs=True)
    check_runnable(schedule, 2, 4)
    with pytest.raises(UserError, match="every op of a plan needs a handler .* has 0F3&2BW0 on rank 0, which has none"):
        Executor(plan_of(schedule), 0, handlers({}, Transport, lambda _: None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks", "num_chunks", "num_microbatches"), [(3, 2, 41), (3, 4, 40), (5, 3, 41)])
def test_no_repeated_window_begins_within_a_pair(num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    schedule = build("interleaved-1f1b", **sizes, pairs=True)
    repeats = find_repeats(schedule)
    assert repeats is not None
    assert not any(row[at - 1] in schedule.pairs for row, at in zip(schedule.order, repeats.begins, strict=True))
    assert tuple(lower(schedule).ops) == communicate(Plan.bare(schedule)).ops


@pytest.mark.parametrize("is_paired", [lambda m: m < 40, lambda m: m % 3 > 0])
def test_windows_repeat_only_where_their_pairs_do(is_paired: Callable[[int], bool]) -> None:
    """Rows whose passes repeat, but of which only some run in pairs."""
    schedule = one_stage(3, 80, lambda rank: 2 * (3 - rank) - 1)
    some_pairs = frozenset(p for p in schedule.pairs if is_paired(p.microbatch))
    schedule = replace(schedule, pairs=some_pairs)
    plan, whole = lower(schedule), communicate(Plan.bare(schedule))
    assert tuple(plan.ops) == whole.ops
    prove(whole)
