"""``compare`` says how to run its shortest schedule: the plan that its last line makes is the one of the table."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from megatron.zero_bubble import SCHEDULES
from megatron.zero_bubble.__main__ import main, parser
from megatron.zero_bubble.cli.compare import how_to_run
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.search.placements import placements
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.candidates import Comparison
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.job.flags import add_flags
from megatron.zero_bubble.planning.setup import Setup
from tests.helpers.rows import some
from tests.helpers.settings import LAYER_COSTS, LAYERS

TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --comm-ms 0.4"
pytestmark = pytest.mark.usefixtures("short_searches")
Capture = pytest.CaptureFixture[str]
QUESTIONS = (
    "--num-ranks 2 --num-microbatches 4",
    "--num-ranks 2 --num-microbatches 4 --placement linear --objective span",
    "--num-ranks 3 --num-microbatches 3 --num-slices 2 --attention-share 0.3 --memory-limit 0.9p",
    "--num-ranks 2 --num-microbatches 3 --vocabulary 1 --output-ms 0.8 --output-wgrad-ms 0.6 --memory-limit 1.5p",
    "--num-ranks 2 --num-microbatches 3 --offload all --host-ms 1 --memory-limit 0.8p",
    "--num-ranks 2 --num-microbatches 2 --placement loop --num-chunks 3",
    f"--costs {LAYERS} --num-ranks 4 --num-microbatches 4 --layout auto",
)


@pytest.mark.parametrize("question", some(QUESTIONS, *QUESTIONS[1:3]))
def test_the_last_line_makes_the_shortest_plan(
    question: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / LAYERS).write_text(json.dumps(LAYER_COSTS))
    monkeypatch.chdir(tmp_path)
    words = question.split() if "--costs" in question else [*TIMES.split(), *question.split()]
    objective: Metric = "span" if "span" in question else "makespan"
    assert main(["compare", *words, "--format", "json"]) == 0
    table = json.loads(capsys.readouterr().out)
    best = min(row[f"{objective}_ms"] for row in table["rows"] if row["within_limit"] and not row["is_lower_bound"])
    assert main(["compare", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    if last.startswith("To run it, add to the job: "):
        own = shlex.join(words).replace("--placement loop --num-chunks 3", "")  # a name has its placement
        command = f"zero-bubble plan {own} --schedule {last.split()[-1]}"
    else:
        command, _, rest = last.removeprefix("To run it: ").partition(" --format json > ")
        assert rest == "plan.json, and add to the job: --zero-bubble-schedule plan.json"
    assert main([*shlex.split(command)[1:], "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[f"{objective}_ms"] == pytest.approx(best)


def test_a_published_schedule_is_run_by_name() -> None:
    """A job accepts the flags of every row that is a schedule by name."""
    figures = Figures(2, 4, lambda on: (PassCosts.uniform(on, 4, 5, 3), PassMemory.uniform(on)))
    comparison = Comparison(2, 2.0, placements("auto", 2), False, Setup())
    job = argparse.ArgumentParser()
    add_flags(job)
    found = {}
    for candidate in comparison.whole(figures):
        if candidate.question.schedule in SCHEDULES:
            line = how_to_run(argparse.Namespace(), candidate, answer(candidate.question).schedule)
            found[candidate.name] = line.removeprefix("To run it, add to the job: ")
    assert found.pop("1f1b") == "It is Megatron's own schedule: add nothing."
    assert found["zb-h1"] == "--zero-bubble-schedule zb-h1"
    assert found["interleaved-1f1b x2"] == "--zero-bubble-schedule interleaved-1f1b --zero-bubble-num-chunks 2"
    for flags in found.values():
        job.parse_args(flags.split())


def test_a_single_microbatch_on_one_rank_needs_nothing(capsys: Capture) -> None:
    assert main(f"compare {TIMES} --num-ranks 1 --num-microbatches 1".split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "It is Megatron's own schedule: add nothing."


def test_schedules_for_comparison_are_listed_on_request(capsys: Capture) -> None:
    command = f"compare {TIMES} --num-ranks 2 --num-microbatches 2 --format json".split()
    for more, listed in (([], False), (["--all"], True)):
        assert main([*command, *more]) == 0
        table = json.loads(capsys.readouterr().out)
        assert any(row["schedule"] == "dualpipe-v" for row in table["rows"]) == listed
        assert ("dualpipe-v: only for comparison; --all lists it" in table["absent"]) != listed


def test_the_columns_are_explained(capsys: Capture) -> None:
    assert main(f"compare {TIMES} --num-ranks 2 --num-microbatches 2".split()) == 0
    out = capsys.readouterr().out
    assert "idle: the mean of all ranks" in out
    assert "vs: gain in throughput, by the makespan; +25.0% takes 20.0% less time" in out
    assert "fitted: passes reordered for these costs" in out


@pytest.mark.parametrize("verb", ["compare", "plan --schedule zb-h1"])
def test_the_unit_of_the_limit_is_told_from_the_peak_of_1f1b(verb: str, capsys: Capture, tmp_path: Path) -> None:
    """The last rank keeps most of a microbatch, but with 1F1B only one of them."""
    file = tmp_path / "costs.json"
    uneven = {"forward_ms": 4, "backward_ms": 5, "wgrad_ms": 3, "activation": [2**30, 2**31], "wgrad": 2**30}
    file.write_text(json.dumps(uneven))
    command = f"{verb} --costs {file} --num-ranks 2 --num-microbatches 4 --memory-limit"
    sentence = "1p is 1 microbatches, 2 GiB: the peak of 1F1B with these costs\n"
    for limit, given in (("1p", True), ("4GiB", False)):
        assert main([*command.split(), limit]) == 0
        assert (sentence in capsys.readouterr().out) == given
    assert main(f"{verb} {TIMES} --num-ranks 2 --num-microbatches 4 --memory-limit 1p".split()) == 0
    assert "1p is" not in capsys.readouterr().out


def test_compare_takes_all_the_flags_that_its_last_line_gives() -> None:
    """Every flag of ``compare`` that ``plan`` has means the same there, so that the line can pass it on."""
    verbs = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr, index]
    plan, compare = ({a.dest: a for a in verbs[name]._actions} for name in ("plan", "compare"))
    for dest in plan.keys() & compare.keys() - {"help", "format"}:
        assert (plan[dest].type, plan[dest].default) == (compare[dest].type, compare[dest].default), dest
