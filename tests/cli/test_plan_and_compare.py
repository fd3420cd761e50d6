"""Tests of ``plan`` with a memory limit, and of the table of ``compare``."""

from __future__ import annotations

import json
import re
import time
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import SCHEDULES, PassCosts, PassMemory, Placement, build, simulate, validate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.analysis.bounds import lower_bound
from megatron.zero_bubble.core.analysis.memory import message_peaks
from megatron.zero_bubble.core.formats.costs import costs_to_json
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.plan import plan_of
from tests.helpers.plans import schedule_from_json
from tests.helpers.rows import some

TIMES = "--forward-ms 2 --backward-ms 2 --wgrad-ms 1 --comm-ms 0.5".split()
SIZES = "--num-ranks 4 --num-microbatches 8".split()
CONFIGS = Path(__file__).parents[2] / "configs"
TINY = ["--config", str(CONFIGS / "gpt_tiny.yaml"), "--mock-data"]
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    content = json.loads(run(capsys, *arguments, "--format", "json"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_plan_with_a_limit_reports_bound_and_gap(capsys: Capture, objective: str) -> None:
    arguments = ["plan", "--schedule", "zb-h1", *SIZES, *TIMES, "--memory-limit", "1p", "--objective", objective]
    plan = run_json(capsys, *arguments)
    placement = Placement.linear(4)
    costs, memory = PassCosts.uniform(placement, 2.0, 2.0, 1.0, 0.5), PassMemory.uniform(placement)
    bound = lower_bound(costs, memory, Workload(placement, 8), 4.0, objective)
    assert (plan["objective"], plan["memory_limit"], plan["memory_limit_microbatches"]) == (objective, 4.0, 4.0)
    assert plan["lower_bound_ms"] == bound.value_ms
    assert plan["gap"] == pytest.approx(1 - bound.value_ms / plan[f"{objective}_ms"], abs=1e-9)
    text = run(capsys, *arguments)
    assert "memory limit 4 microbatches: met, peak 4 microbatches per rank" in text
    assert f"lower bound {bound.value_ms:.3f} ms {objective}" in text
    gap = f"{plan['gap']:.2%}"
    assert f"gap {gap}: no schedule with this placement and limit can be more than {gap} shorter" in text
    assert "planned in 0.0" in text


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--schedule", "zb-auto"],
        pytest.param(["compare", "--max-chunks", "2"], marks=pytest.mark.full),
    ],
)
def test_search_in_python_is_reported(capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    sizes = ["--num-ranks", "2", "--num-microbatches", "2"]
    arguments, module = [*command, *sizes, *TIMES], {"plan": "plan_text", "compare": "compare_table"}[command[0]]
    for compiled in (True, None):
        monkeypatch.setattr(f"megatron.zero_bubble.cli.{module}.compiled", lambda: compiled)  # noqa: B023
        out = run(capsys, *arguments)
        assert ("in pure Python, which searches less" in out) == (compiled is None)


def test_exceeded_limit_is_reported_without_a_gap(capsys: Capture) -> None:
    out = run(capsys, "plan", "--schedule", "zb-h2", *SIZES, *TIMES, "--memory-limit", "1p")
    assert "memory limit 4 microbatches: EXCEEDED by zb-h2, peak 7 microbatches per rank" in out
    assert "gap" not in out


def test_plan_without_a_limit_has_no_bound(capsys: Capture) -> None:
    assert "lower_bound_ms" not in run_json(capsys, "plan", "--schedule", "zb-h2", *SIZES, *TIMES)


@pytest.mark.parametrize("placement", ["linear", "vee"])
def test_zb_auto_respects_the_memory_limit(capsys: Capture, placement: str) -> None:
    arguments = ["plan", "--schedule", "zb-auto", *SIZES, *TIMES, "--placement", placement]
    plan = run_json(capsys, *arguments, "--memory-limit", "0.75p")
    validate(schedule_from_json(json.dumps(plan)))
    assert len(plan["stage_to_rank"]) == {"linear": 4, "vee": 8}[placement]
    assert max(plan["peak_activation"]) <= 3.0
    assert plan["memory_limit"] == 3.0
    assert plan["lower_bound_ms"] <= plan["span_ms"] * (1 + 1e-9)
    assert plan["planning_seconds"] > 0
    assert run_json(capsys, *arguments)["memory_limit"] == 4.0


def test_zb_auto_uses_costs_per_stage(capsys: Capture, tmp_path: Path) -> None:
    """A costs file for eight stages of a V fits both placements; its memory and the limit are in bytes."""
    placement = Placement.vee(4)
    costs = PassCosts((3.0, *(1.0,) * 6, 5.0), (1.0,) * 8, (0.5,) * 8, 0.25, {(0, 1): 2.0})
    memory = PassMemory((2.0**30,) * 8, (2.0**29,) * 8)
    path = tmp_path / "costs.json"
    path.write_text(costs_to_json(costs, memory))
    arguments = ["plan", "--schedule", "zb-auto", *SIZES, "--costs", str(path), "--memory-limit", "6GiB"]
    plan = run_json(capsys, *arguments, "--placement", "vee")
    schedule = schedule_from_json(json.dumps(plan))
    assert schedule.placement == placement
    assert plan["span_ms"] == simulate(schedule, costs, memory).span_ms
    assert max(plan["peak_activation"]) <= 3.0
    linear = run_json(capsys, *arguments, "--placement", "linear")
    work = 8 * (1.0 + 5.0 + 2 * 1.0 + 2 * 0.5)
    assert linear["span_ms"] * (1 - linear["bubble_rate_span"]) == pytest.approx(work)
    assert "6 GiB: met" in run(capsys, *arguments)


ROW_KEYS = frozenset(
    "schedule placement num_slices span_ms makespan_ms bubble_rate_span bubble_rate_makespan idle_rate_span "
    "idle_rate_makespan imbalance peak_microbatches peak_memory messages message_bytes speedup_over_1f1b "
    "speedup_over_interleaved within_limit layout vocabulary offloaded_share host_peak gathers reductions static_bytes "
    "replica_bytes tensor_parallel tensor_bytes is_lower_bound needed_layout".split()
)
"""A contract with programs that read the table."""


def test_compare_lists_every_schedule_and_sorts_fitting_ones_first(capsys: Capture) -> None:
    table = run_json(capsys, "compare", *SIZES, *TIMES, "--max-chunks", "2", "--all")
    assert all(row.keys() == ROW_KEYS for row in table["rows"])
    rows = {(row["schedule"], row["placement"]): row for row in table["rows"]}
    names = ("interleaved-1f1b", "breadth-first", "gis", "gis-h", "pipe-offload", "zero-pp", "zb-interleaved")
    looped_names = {f"{name} x2" for name in names}
    fitted = {f"{name} fitted" for name in ("zb-v", "v-half", "v-min", "zb-interleaved x2")}
    by_name = {name for name, recipe in SCHEDULES.items() if recipe.shape != "interleaved" and not recipe.sliced}
    assert {name for name, _ in rows} == {*by_name, "zb-auto", *looped_names, *fitted}
    for name in fitted:
        on = "interleaved" if " x" in name else "vee"
        own, pattern = rows[name, on], rows[name.removesuffix(" fitted"), on]
        assert own["makespan_ms"] <= pattern["makespan_ms"]
        assert own["peak_microbatches"] <= pattern["peak_microbatches"]
    assert rows.keys() >= {("zb-auto", "linear"), ("zb-auto", "vee")}
    order = [(not row["within_limit"], row["makespan_ms"]) for row in table["rows"]]
    assert order == sorted(order)
    h1, h2 = rows["zb-h1", "linear"], rows["zb-h2", "linear"]
    assert (h1["within_limit"], h2["within_limit"], h2["peak_microbatches"]) == (True, False, 7.0)
    own = Placement.linear(4)
    plain = simulate(build("1f1b", num_ranks=4, num_microbatches=8), PassCosts.uniform(own, 2.0, 2.0, 1.0, 0.5))
    assert rows["1f1b", "linear"]["speedup_over_1f1b"] == 1.0
    assert h1["speedup_over_1f1b"] == pytest.approx(plain.makespan_ms / h1["makespan_ms"])
    looped = rows["interleaved-1f1b x2", "interleaved"]
    assert h1["speedup_over_interleaved"] == pytest.approx(looped["makespan_ms"] / h1["makespan_ms"])
    assert [h1["messages"], looped["messages"], rows["zb-auto", "vee"]["messages"]] == [48, 112, 96]
    assert h1["message_bytes"] is None
    for placement, ms in table["lower_bound_ms"].items():
        assert ms <= rows["zb-auto", placement]["makespan_ms"] * (1 + 1e-9)


def test_compare_sorts_by_makespan(capsys: Capture) -> None:
    table = run_json(
        capsys, "compare", *SIZES, *TIMES, "--equal-passes", "--objective", "makespan", "--placement", "linear"
    )
    order = [(not row["within_limit"], row["makespan_ms"]) for row in table["rows"]]
    assert order == sorted(order)
    assert [row["placement"] for row in table["rows"] if row["schedule"] == "zb-auto"] == ["linear"]


def test_compare_reports_omitted_schedules_with_reasons(capsys: Capture) -> None:
    out = run(capsys, "compare", *SIZES, *TIMES, "--equal-passes")
    assert "no linear schedule within the limit has a makespan below" in out
    tight = run(capsys, "compare", *SIZES, *TIMES, "--equal-passes", "--memory-limit", "0.2p")
    assert "not compared: the memory limit admits no schedule" in tight
    assert "no linear schedule" not in tight
    assert tight.count("over the limit") == tight.count(" vee ") + tight.count(" linear ") + tight.count(
        " interleaved "
    )


def test_text_table_columns_are_aligned(capsys: Capture) -> None:
    lines = run(capsys, "compare", *SIZES, *TIMES, "--equal-passes", "--activation-memory", "2e9").splitlines()
    assert lines[0].startswith(
        "4 ranks, 8 microbatches, memory limit 4 microbatches, 7.451 GiB; shortest makespan first"
    )
    h1 = next(line for line in lines if line.startswith("zb-h1"))
    for label, end in (("span ms", "55.000"), ("bubble", "27.27%"), ("GiB", "7.451"), ("sends", "48")):
        assert lines[1].index(label) + len(label) == h1.index(end) + len(end), label


@pytest.mark.parametrize("limit", ["0.5p", "2p"])
def test_compare_draws_the_first_row_of_the_table(capsys: Capture, limit: str) -> None:
    out = run(capsys, "compare", *SIZES, *TIMES, "--equal-passes", "--memory-limit", limit)
    table, picture = out.split("\n\nShortest within the limit: ")
    first = table.splitlines()[2]
    name, (_, makespan_ms) = first[:22].strip(), re.findall(r"\d+\.\d{3}\b", first)
    assert not first.endswith("over the limit")
    assert picture.startswith(f"{name}: 4 ranks, 8 microbatches, {float(makespan_ms):.1f} ms, ")
    *rows, run_it = picture.split("\n\n")[1].splitlines()
    assert len(rows) == 4 and run_it.startswith("To run it")


def test_compare_draws_nothing_if_no_schedule_is_within_the_limit(capsys: Capture) -> None:
    assert "Shortest" not in run(capsys, "compare", *SIZES, *TIMES, "--equal-passes", "--memory-limit", "0.2p")


def test_large_pictures_are_excerpts_as_wide_as_the_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    large = ["--num-ranks", "16", "--num-microbatches", "4", *TIMES]
    plan, compare = ["plan", "--schedule", "zb-h2"], ["compare", "--max-chunks", "2", "--equal-passes"]
    for columns, width, command in (("100", 100, plan), ("500", 160, plan), ("500", 160, compare)):
        monkeypatch.setenv("COLUMNS", columns)
        out = run(capsys, *command, *large)
        assert "\nwarm-up\n" in out and "Left out: ranks 2-6, 9-13." in out
        assert max(len(line) for line in out.splitlines() if line.endswith("|")) == width


@pytest.mark.parametrize("terminal", [True, False])
def test_compare_shows_progress_on_a_terminal_only(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert main(["compare", *SIZES, *TIMES, "--max-chunks", "2", "--equal-passes"]) == 0
    shown = capsys.readouterr().err.split("\r\x1b[K")
    if terminal:
        row = f"{'1f1b (linear)':38}        63.0 ms   36.5% idle       4 microbatches\nplanning 1f1b (1 of 15)"
        second = "planning interleaved-1f1b x2 (2 of 15); shortest so far: 1f1b, 63.0 ms"
        assert shown[:4] == ["", "planning 1f1b (1 of 15)", row, second]
        assert re.fullmatch(r"planning zb-auto vee \(15 of 15\); shortest so far: [a-z].*, [\d.]+ ms", shown[-5])
        assert shown[-4].startswith("zb-auto (vee)") and shown[-3:] == ["", "computing lower bounds", ""]
    else:
        assert shown == [""]


@pytest.mark.parametrize(
    ("words", "slow", "expected"),
    [
        (["plan", "--schedule", "zb-h1", *SIZES, *TIMES], "plan.answer", "planning"),
        (["compare", *SIZES, *TIMES, "--equal-passes"], "compare._row", r"planning .* \(\d+ of \d+\)"),
        (["compare", *SIZES, *TIMES, "--equal-passes"], "compare.Comparison.bounds", "computing lower bounds"),
        (["dry-run", "--gpus-per-node", "2", "--", *TINY], "dry_run.planned_job", "checking the job and its plan"),
    ],
)
def test_a_long_command_shows_lines_of_progress_elsewhere(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], slow: str, expected: str
) -> None:
    monkeypatch.setattr("megatron.zero_bubble.cli.progress._QUIET_S", 0.02)
    module, *names = slow.split(".")
    original = reduce(getattr, names, import_module(f"megatron.zero_bubble.cli.{module}"))

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return original(*args, **kwargs)

    monkeypatch.setattr(f"megatron.zero_bubble.cli.{slow}", slowly)
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(re.fullmatch(f"{expected}, \\d+ s so far", line) for line in lines)
    assert len(lines) < 16  # each wait is twice the one before it


def test_estimated_plan_states_its_assumptions(capsys: Capture) -> None:
    out = run(capsys, "plan", "--schedule", "zb-h1", "--config", str(CONFIGS / "gpt_6.2b.yaml"), "--gpu", "a100")
    assert out.startswith("Estimated from the shapes in ")
    assert "a100: 312 TFLOPS at 80% in matrix products" in out
    assert "Attention uses flash kernels, recompute none" in out
    assert "vocabulary of 50,304 is assumed" in out
    assert "zb-h1: 8 ranks, 24 microbatches" in out
    unfused = ["--no-flash-attention", "--num-microbatches", "40", "--memory-limit", "60GiB"]
    out = run(capsys, "plan", "--schedule", "zb-h1", "--config", str(CONFIGS / "gpt_6.2b.yaml"), *unfused)
    assert "h100: 989 TFLOPS" in out
    assert "Attention stores its scores" in out
    assert "zb-h1: 8 ranks, 40 microbatches" in out
    assert "60 GiB: met" in out


def test_messages_of_a_model_are_counted(capsys: Capture) -> None:
    """A message of gpt_6.2b is 2 bytes x 3 x 1024 tokens x 4096."""
    flags = ("--schedule", "zb-h1", "--config", str(CONFIGS / "gpt_6.2b.yaml"))
    plan = plan_of(build("zb-h1", num_ranks=8, num_microbatches=24))
    expected = [peak * 2 * 3 * 1024 * 4096 for peak in message_peaks(plan)]
    assert run_json(capsys, "plan", *flags, "--format", "json")["message_peak"] == expected
    listed = " ".join(f"{size / 2**30:.3g}" for size in expected)
    assert f"GiB by rank, messages: {listed}\n" in run(capsys, "plan", *flags)


@pytest.mark.parametrize(("name", "p"), some([("1.5b", 8), ("6.2b", 8), ("14.6b", 16), ("28.3b", 32)], ("1.5b", 8)))
def test_compare_runs_for_every_published_model(capsys: Capture, name: str, p: int) -> None:
    table = run_json(capsys, "compare", "--config", str(CONFIGS / f"gpt_{name}.yaml"), "--max-chunks", "2")
    assert table["num_ranks"] == p
    assert all(row["message_bytes"] > 0 and row["peak_memory"] > 2**30 for row in table["rows"])


def test_indivisible_layers_are_rejected(capsys: Capture) -> None:
    config = str(CONFIGS / "gpt_14.6b.yaml")
    assert main(["plan", "--schedule", "zb-h1", "--config", config, "--num-ranks", "12"]) == 2
    assert "leaves 42 layers to 10 ranks; set decoder-first-pipeline-num-layers" in capsys.readouterr().err


def test_passes_of_zero_length_are_drawn(capsys: Capture) -> None:
    zeros = "--forward-ms 0 --backward-ms 0 --wgrad-ms 1".split()
    assert "bubble rate" in run(capsys, "plan", "--schedule", "zb-h1", *SIZES, *zeros)


def test_number_of_ranks_below_one_is_rejected(capsys: Capture) -> None:
    assert main(["compare", "--config", str(CONFIGS / "gpt_tiny.yaml"), "--num-ranks", "-1"]) == 2
    assert "num_ranks must be 1 or more; got -1" in capsys.readouterr().err


def test_schedule_on_a_v_is_fitted_to_the_costs_without_equal_passes(capsys: Capture) -> None:
    costs = ["--forward-ms", "9", "--backward-ms", "9", "--wgrad-ms", "4", "--comm-ms", "0.5"]
    own = run_json(capsys, "plan", "--schedule", "v-min", *SIZES, *costs)
    published = run_json(capsys, "plan", "--schedule", "v-min", *SIZES, *costs, "--equal-passes")
    assert own["schedule"] == published["schedule"] == "v-min"
    assert own["span_ms"] < published["span_ms"]
    assert max(own["peak_activation"]) <= max(published["peak_activation"])


def test_step_ms_adds_the_optimizer_step(capsys: Capture) -> None:
    """An iteration takes makespan plus step with a synchronous optimizer, span plus step with post-validation."""
    sizes = ["--num-ranks", "4", "--num-microbatches", "12"]
    times = ["--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms", "2", "--comm-ms", "0.1"]
    arguments = ["plan", "--schedule", "zb-v", *sizes, *times]
    plan = run_json(capsys, *arguments)
    text = run(capsys, *arguments, "--step-ms", "0.25")
    synchronous, ahead = plan["makespan_ms"] + 0.25, plan["span_ms"] + 0.25
    assert ahead < synchronous
    expected = f"step of 0.25 ms: {synchronous:.3f} ms synchronous, {ahead:.3f} ms with post-validation"
    assert expected in text
    assert main([*arguments, "--step-ms", "-1"]) == 2
    assert "--step-ms must be a finite time, 0 or above; got -1.0" in capsys.readouterr().err


def test_num_chunks_sets_the_stages_of_interleaved_schedules(capsys: Capture) -> None:
    plan = run_json(capsys, "plan", "--schedule", "interleaved-1f1b", *SIZES, *TIMES, "--num-chunks", "3")
    assert plan["num_stages"] == 12


def test_plan_of_a_file_says_what_a_run_would_refuse(capsys: Capture, tmp_path: Path) -> None:
    """A valid order of W passes that training does not support is planned, with the sentence of the run."""
    order = "0F0 0F1 0F2 0B1 0B0 0B2 0W0 0W2 0W1".split()
    file = tmp_path / "plan.json"
    content = {"schedule": "mine", "num_microbatches": 3, "stage_to_rank": [0], "order": [order]}
    plan = ["plan", "--schedule-file", str(file), "--forward-ms", "1", "--backward-ms", "1", "--wgrad-ms", "1"]
    for row, refused in ((order, True), ([*order[:6], "0W1", "0W0", "0W2"], False)):
        file.write_text(json.dumps(content | {"order": [row]}))
        assert main(plan) == 0
        said = "A run would refuse this schedule: each stage must run its W passes in the order of its B passes"
        assert (said in capsys.readouterr().out) is refused


def test_plan_of_a_file_names_what_it_leaves_out(capsys: Capture, tmp_path: Path) -> None:
    """A run takes it, so that its iteration has another length than this plan."""
    file = tmp_path / "plan.json"
    for more, left in (
        ([], ""),
        (["--offload", "all", "--host-ms", "1"], "moves"),
        (["--shard-weights", "--gather-ms", "1"], "sharded units"),
    ):
        main(["plan", "--schedule", "zero-pp", *SIZES, *TIMES, *more, "--format", "json"])
        file.write_text(capsys.readouterr().out)
        assert main(["plan", "--schedule-file", str(file), *TIMES]) == 0
        _, _, named = capsys.readouterr().out.partition("planned here; a run also takes its ")
        assert named.partition(".\n")[0] == left
