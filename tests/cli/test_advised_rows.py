"""Tests of the rows of ``advise``: each runs as it is advised, with the hardware queues that its job can have."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advice_text import text_of
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.job_runs import SEVERAL
from megatron.zero_bubble.core.errors import Refusal, UserError
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning import advice as planning_advice
from megatron.zero_bubble.planning.advice import Adviser, StartedWith, Tried
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.change import AdviceRow, Today, need_of
from megatron.zero_bubble.planning.codecs import difference
from megatron.zero_bubble.planning.feasibility import ANY_RUN, Feasibility
from megatron.zero_bubble.planning.job.arguments import parser
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Searched, Setup, Validated
from megatron.zero_bubble.planning.worth import Advice
from tests.cli.test_advise import SMALL, Capture, advice, check_rows, job_of, set_queues
from tests.cli.test_joint_search import random_pipeline
from tests.helpers.recipes import RECIPES


@pytest.mark.full
@pytest.mark.parametrize("queues", ["1", None])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_run_as_they_are_advised(capsys: Capture, name: str, queues: str | None) -> None:
    """With searches: where the launch script sets the hardware queues, and where CUDA's default holds."""
    flags, own = job_of(name)
    found = advice(capsys, flags, *own)
    check_rows(capsys, found, flags, *own, queues=queues)


TENSOR = [*SMALL, "--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.mark.parametrize(
    "more", [pytest.param(["--quick"], id="quick"), pytest.param([], id="searches", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("job", "gpu"), [(SMALL, "h100"), pytest.param(TENSOR, "b200", marks=pytest.mark.full), (TENSOR, "h100")]
)
def test_rows_run_where_megatron_wants_one_queue(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, job: list[str], gpu: str, more: list[str]
) -> None:
    """With tensor parallelism before Blackwell no row may ask for more."""
    set_queues(monkeypatch, "1")
    flags = changed(job, ["--vocab-size", "256000"], ())
    own = ("--gpus-per-node", "8", "--gpu", gpu)
    found = advice(capsys, flags, *own, *more)
    assert found["advice"]
    if job is TENSOR and gpu == "h100":
        assert not any(row["environment"] for row in found["advice"])
    check_rows(capsys, found, flags, *own)


def test_what_needs_more_queues_says_so_or_drops_out() -> None:
    """Megatron's own schedules need no proof."""
    pipeline, today = random_pipeline(17)
    one, several = (HardwareQueues(number, "", f"there are {number} queues", "32") for number in (1, 32))
    settings = StartedWith(Feasibility(one, "late")), StartedWith(Feasibility(several, "late"), (SEVERAL,))
    changes = [change for change in pipeline.named_changes() if change.question.schedule == "breadth-first"]
    stock = [change for change in pipeline.named_changes() if not change.is_ours]
    advisers = [
        Adviser(today, "makespan", None, lambda *_: None, 0.01, settings=settings[:number]) for number in (1, 2)
    ]
    assert not advisers[0].advise(changes).rows and advisers[0].dropped
    assert advisers[0].advise(stock).rows
    assert all("needs several hardware queues" in each.reason for each in advisers[0].dropped)
    shown = advisers[1].advise(changes).rows
    assert shown and {row.environment for row in shown} == {(SEVERAL,)}


@pytest.mark.parametrize(("longer", "environment"), [(False, ()), (True, (SEVERAL,))])
def test_what_runs_as_planned_only_with_more_queues_says_so(longer: bool, environment: tuple[str, ...]) -> None:
    """With few queues a job may run a longer plan of the same change."""
    pipeline, today = random_pipeline(1)
    settings = StartedWith(ANY_RUN), StartedWith(ANY_RUN, (SEVERAL,))

    def tried(row: AdviceRow) -> Tried:
        is_other = longer and not row.environment
        return Tried(today.timeline if is_other else row.plan.timeline, row.need, None)

    changes = [change for change in pipeline.named_changes() if change.is_ours]
    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01, settings=settings, tried=tried)
    best = adviser.advise(changes).best
    assert best is not None and best.timeline is best.plan.timeline and best.environment == environment


def test_a_row_has_the_figures_of_its_dry_run() -> None:
    """One that the dry run refuses drops out, and the next best is tried."""
    pipeline, today = random_pipeline(1)
    refused: list[str] = []

    def messages(row: AdviceRow) -> tuple[float, ...]:
        return (1.0,) * len(row.need.activations)

    def tried(row: AdviceRow) -> Tried:
        if not refused or row.change.name == refused[0]:
            refused.append(row.change.name)
            raise UserError("not this one")
        return Tried(row.plan.timeline, replace(row.need, messages=messages(row)), None)

    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01, tried=tried)
    found = adviser.advise(pipeline.named_changes())
    assert refused[0] not in {row.change.name for row in found.rows} and len(found.rows) > 0
    assert [each.reason for each in found.dropped if each.name == refused[0]] == ["not this one"]
    assert all(row.need.messages == messages(row) for row in found.rows)


@pytest.mark.parametrize("source", ["predictions", "costs"])
def test_rows_without_layers_for_their_stages_drop_out(capsys: Capture, tmp_path: Path, source: str) -> None:
    """Costs without figures per layer do not tell which stages a model can fill."""
    flags, own = changed(SMALL, ["--num-layers", "4"], ()), ["--gpus-per-node", "4", "--quick"]
    if source == "predictions":
        flags += ["--mtp-num-layers", "1"]
    else:
        times = {key: [1.0] * 4 for key in ("forward_ms", "backward_ms", "wgrad_ms")}
        file = tmp_path / "costs.json"
        file.write_text(json.dumps({**times, "activation": [1e8] * 4, "wgrad": [5e7] * 4}))
        own += ["--costs", str(file)]
    found = advice(capsys, flags, *own)
    assert found["advice"]
    assert {row["num_chunks"] for row in found["advice"]} == {1}
    (reason,) = {each["reason"] for each in found["dropped"] if each["name"] == "zb-v"}
    assert reason.startswith("4 layers with embedding and loss do not fill 8 pipeline stages; use at least 6 layers")


def test_only_what_is_to_be_shown_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof takes as long as a search."""
    pipeline, today = random_pipeline(1)
    proved: list[str] = []
    refusal = Feasibility.refusal

    def counted(own: Feasibility, schedule: Schedule, *more: Any) -> str | None:
        proved.append(schedule.name)
        return refusal(own, schedule, *more)

    monkeypatch.setattr(Feasibility, "refusal", counted)
    settings = (StartedWith(Feasibility(HardwareQueues(1, "", "there is one queue", "32"), "late")),)
    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01, settings=settings)
    found = adviser.advise(pipeline.named_changes())
    assert 0 < len(proved) <= len(found.rows) + len(adviser.dropped) < len(adviser.rows) + len(adviser.dropped)


def test_a_search_that_a_refused_row_had_beaten_is_made() -> None:
    pipeline, today = random_pipeline(0)
    changes = [each for each in pipeline.changes() if each.question.offloading is None]
    names: list[str] = []

    def tried(row: AdviceRow) -> Tried:
        if not row.change.searches:
            raise UserError("not by name")
        return Tried(row.plan.timeline, row.need, None)

    found = Adviser(today, "makespan", None, lambda *_: None, 0.01, tell=names.append, tried=tried).advise(changes)
    first = next(place for place, name in enumerate(names) if name.endswith("as the job would run it"))
    assert {row.change.name for row in found.rows} & set(names[first:])


def test_a_quick_adviser_compares_by_few_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of all microbatches: what is to be shown is planned with all."""
    pipeline, today = with_many_microbatches(*random_pipeline(1))
    counts: list[int] = []

    def counted(question: Question) -> Answer:
        counts.append(question.costs.num_microbatches)
        return answer(question)

    monkeypatch.setattr(planning_advice, "answer", counted)

    def tried(row: AdviceRow) -> Tried:
        plan = answer(row.change.question)
        return Tried(plan.timeline, need_of(plan.timeline, plan.costs), None)

    changes, most = list(pipeline.named_changes()), pipeline.costs.num_microbatches
    whole = Adviser(today, "makespan", None, lambda *_: None, 0.01, tried=tried).advise(changes)
    assert set(counts) == {most}
    counts.clear()
    quick = Adviser(today, "makespan", None, lambda *_: None, 0.01, tried=tried, is_quick=True).advise(changes)
    assert counts and max(counts) < most / 2
    shown = [
        [(row.change.name, row.titles, row.ms, row.need, row.gap) for row in found.rows] for found in (quick, whole)
    ]
    assert shown[0] == shown[1] != []
    assert all(row.plan.schedule.num_microbatches == most for row in quick.rows)


def with_many_microbatches(pipeline: JobChanges, today: Today) -> tuple[JobChanges, Today]:
    costs = replace(pipeline.costs, num_microbatches=16 * pipeline.costs.num_ranks)
    schedule = costs.build("1f1b")
    timeline = timeline_of(schedule, *costs.on(schedule.placement))
    return replace(pipeline, costs=costs), Today(timeline, costs, need_of(timeline, costs))


def test_plans_as_long_go_to_less_memory() -> None:
    """Within half a percent; and what is only for comparison is no advice."""
    pipeline, today = random_pipeline(1)
    changes = list(pipeline.named_changes())
    assert not any(change.question.schedule == "dualpipe-v" for change in changes)
    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01)
    adviser.advise(changes)
    row = max(adviser.rows, key=lambda row: row.gain)
    larger = replace(row, need=replace(row.need, activations=tuple(2 * each for each in row.need.activations)))
    adviser.rows = [larger, replace(row, change=replace(row.change, name="small"))]
    assert {own.change.name for own in adviser._chosen() if "fastest" in own.titles} == {"small"}


def test_one_rule_that_refuses_most_is_printed_once(capsys: Capture) -> None:
    """Nothing is said of the gain of what was not planned."""
    assert main(["advise", "--quick", "--gpus-per-node", "8", "--", *TENSOR, "--use-megatron-fsdp"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "more changes are refused for one reason: " in line)
    assert "use_megatron_fsdp" in line
    assert "no change gains anything" not in out


def test_what_overlaps_stand_in_the_way_of_is_planned_without_them(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row has the flags that disable them, and runs so; a note says what that may cost."""
    set_queues(monkeypatch, "1")
    job = [*TENSOR, "--vocab-size", "256000", "--tp-comm-overlap", "--disable-tp-comm-overlap-ag"]
    own = ("--gpus-per-node", "8")
    found = advice(capsys, job, *own, "--quick")
    ours = [row for row in found["advice"] if "--zero-bubble-schedule" in row["flags"]]
    off = "tp_comm_bulk_wgrad and tp_comm_bulk_dgrad are switched off"
    assert ours and any(off in note and "is in no figure" in note for note in found["job"]["notes"])
    check_rows(capsys, found, job, *own)


def test_what_could_not_be_planned_is_not_said_to_gain_nothing() -> None:
    pipeline, today = random_pipeline(1)
    adviser = Adviser(today, "makespan", None, lambda *_: Refusal("the job refuses it"), 0.01)
    text = text_of(adviser.advise(pipeline.named_changes()), Setup(), ())
    assert "no change could be planned, so that nothing is known of what one gains" in text
    assert "gains anything" not in text


def test_the_job_as_it_is_is_printed_before_planning(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes a while; and a row that is not the fastest is advised with the reason."""
    printed: list[str] = []

    def advised(own: Adviser, changes: Iterable[Any]) -> Any:
        printed.append(capsys.readouterr().out)
        return advise(own, changes)

    advise = Adviser.advise
    monkeypatch.setattr(Adviser, "advise", advised)
    assert main(["advise", "--quick", "--gpus-per-node", "4", "--", *SMALL]) == 0
    assert "The job as it is: 1f1b" in printed[0] and "GiB on the fullest rank" in printed[0]
    out = capsys.readouterr().out
    assert out.startswith("\n   change ") and "The job as it is" not in out
    (verdict,) = (line for line in out.splitlines() if line.startswith("Add "))
    first, *_ = (line.split()[1] for line in out.splitlines() if line.startswith("1  ") and " add " not in line)
    assert ("It is simpler than" in verdict) is (f"--zero-bubble-schedule {first}" not in verdict)


@pytest.mark.full
def test_effort_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and what is left out are the same on a slower machine; a smaller number searches for less."""
    pipeline, today = random_pipeline(0)
    changes = [each for each in pipeline.changes() if each.question.offloading is None]

    def advised(most_searched: float) -> Advice:
        return Adviser(today, "makespan", None, lambda *_: None, 0.01, most_searched).advise(changes)

    usual = advised(200)
    clock = itertools.count(0.0, 86_400.0)
    for name in ("time", "perf_counter", "process_time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: next(clock))
    slow = advised(200)
    assert [(row.change.name, row.ms) for row in slow.rows] == [(row.change.name, row.ms) for row in usual.rows]
    assert slow.left_out == usual.left_out != () and not advised(math.inf).left_out
    assert set(advised(0).left_out) > set(usual.left_out)


def test_what_is_refused_does_not_count_as_searched() -> None:
    pipeline, today = random_pipeline(0)
    searches = [change for change in pipeline.changes() if change.searches]
    found = Adviser(today, "makespan", None, lambda *_: Refusal("no"), 0.01, 1).advise(searches)
    assert len(found.dropped) > 1 and not found.left_out


def test_a_job_is_parsed_once(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    parsed: list[int] = []
    parse = parser.parse_megatron

    def counted(argv: list[str]) -> Any:
        parsed.append(len(argv))
        return parse(argv)

    monkeypatch.setattr(parser, "parse_megatron", counted)
    known = [*SMALL, "--vocab-size", "1000"]  # others are tried where it is assumed
    assert advice(capsys, known, "--gpus-per-node", "4", "--quick")["advice"]
    assert len(parsed) == 1


def test_what_is_left_out_has_a_line_each(capsys: Capture) -> None:
    """Names contain commas."""
    pipeline, today = random_pipeline(0)
    found = Adviser(today, "makespan", None, lambda *_: None, 0.01, 0).advise(pipeline.changes())
    text = text_of(found, Setup(), ())
    assert all(f"\n  {name}\n" in text for name in found.left_out) and any(", " in name for name in found.left_out)


def test_a_change_leaves_out_what_only_the_schedule_before_it_needs() -> None:
    """How the job steps and sums stays as it is."""
    own = Setup(Searched("vee", keep_faster=True), step=Validated(), exact=True)
    pipeline = replace(random_pipeline(1)[0], setup=own)
    (change,) = (change for change in pipeline.named_changes() if change.name == "zb-h1")
    add, leave_out = difference(own, change.setup)
    assert add == ("--zero-bubble-schedule", "zb-h1")
    assert {"--zero-bubble-placement", "--zero-bubble-keep-faster"} < set(leave_out)
    assert not {"--zero-bubble-post-validation", "--zero-bubble-exact"} & set(leave_out)
    assert (change.setup.step, change.setup.exact) == (own.step, True)
