"""Tests of ``advise``: what it says of published recipes, that it finds the best, and that a job accepts its flags."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.engine.runtime.backends import QUEUES
from megatron.zero_bubble.integration.adapter.tracer import LAST_ITERATIONS, end_of_run
from megatron.zero_bubble.planning.advice import Adviser
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import NUMBERS
from tests.cli.test_joint_search import random_pipeline
from tests.helpers.recipes import COMMON, RECIPES
from tests.helpers.rows import some
from tests.helpers.small_recipes import SMALL as SMALL_JOBS

Capture = pytest.CaptureFixture[str]
SMALL = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 --bf16 --train-iters 10 --lr 1e-4 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --mock-data --untie-embeddings-and-output-weights"
).split()


def advice(capsys: Capture, flags: list[str], *own: str) -> dict[str, Any]:
    assert main(["advise", *own, "--format", "json", "--", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def check_rows(capsys: Capture, found: dict[str, Any], flags: list[str], *own: str, queues: str | None = "1") -> None:
    """A dry run accepts the flags of every row, and gives it the same time and memory.

    Advice assumes one hardware queue. With more, which None stands for, a search may find a shorter order.
    """
    for row in found["advice"]:
        job = changed(flags, row["flags"], row["leave_out"])
        with pytest.MonkeyPatch.context() as patch:
            set_queues(patch, queues)
            for variable in row["environment"]:
                patch.setenv(*variable.split("="))
            code = main(["dry-run", *own, "--megatron-lm", "--", *job])
        out, err = capsys.readouterr()
        assert code == 0, f"{row['name']}: {err}"
        if "--zero-bubble-offload" in row["flags"]:
            continue  # what moves is planned from measured copies
        (planned,) = re.findall(r", ([\d,.]+) ms, bubble ", out)
        if queues is None and float(planned.replace(",", "")) < row["makespan_ms"]:
            continue
        assert planned == f"{row['makespan_ms']:,.1f}", row["name"]
        if row["memory_bytes"] is not None:
            table = out[out.index("pipeline rank ") :].partition("\n\n")[0].splitlines()[1:]
            totals = [float(line.split()[-1]) for line in table]
            assert max(totals) == pytest.approx(row["memory_bytes"] / 2**30, abs=0.051), row["name"]


def set_queues(patch: pytest.MonkeyPatch, number: str | None) -> None:
    patch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if number is None:
        patch.delenv(QUEUES, raising=False)
    else:
        patch.setenv(QUEUES, number)


def check_trained(found: dict[str, Any], flags: list[str], name: str) -> None:
    """``tests/integration/megatron_lm/test_recipes.py`` trains a small job with the change of every row."""
    trained = {
        (frozenset(row.flags.split()), frozenset(row.drops.split()) & frozenset(flags), NUMBERS[row.numbers])
        for row in SMALL_JOBS[name].rows
    }
    for row in found["advice"]:
        assert (frozenset(row["flags"]), frozenset(row["leave_out"]), row["bits"]) in trained, row["name"]


def job_of(name: str) -> tuple[list[str], tuple[str, ...]]:
    recipe = RECIPES[name]
    return shlex.split(f"{COMMON} {recipe.flags}"), ("--nodes", str(recipe.nodes), "--gpu", recipe.gpu)


BY_DEFAULT = "28.3B of the Zero Bubble paper, 32 A100", "DeepSeek-V3, 4 microbatches", "Qwen3-235B, 256 H100"


@pytest.mark.parametrize("name", some(RECIPES, *BY_DEFAULT))
def test_published_recipes_with_even_passes(capsys: Capture, tmp_path: Path, name: str) -> None:
    """The bubble is the published one, and a change pays where it is large."""
    flags, own = job_of(name)
    file, stages = tmp_path / "costs.json", RECIPES[name].stages
    file.write_text(json.dumps({key: [1.0] * stages for key in ("forward_ms", "backward_ms", "wgrad_ms")}))
    found = advice(capsys, flags, *own, "--quick", "--costs", str(file))
    assert found["job"]["bubble_rate"] == pytest.approx(RECIPES[name].bubble, abs=0.003)
    assert found["worth_it"] is (RECIPES[name].bubble > 0.02)
    check_rows(capsys, found, flags, *own, "--costs", str(file))
    check_trained(found, flags, name)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes_with_estimates(capsys: Capture, name: str) -> None:
    """Jobs with experts and several stages per rank run Megatron's combined schedule, as published."""
    flags, own = job_of(name)
    if "--num-experts" in flags and RECIPES[name].stages > int(
        flags[flags.index("--pipeline-model-parallel-size") + 1]
    ):
        flags.append("--overlap-moe-expert-parallel-comm")
    found = advice(capsys, flags, *own, "--quick")
    assert found["worth_it"] is RECIPES[name].pays
    check_rows(capsys, found, flags, *own)
    check_trained(found, flags, name)


@pytest.mark.full
def test_a_small_job_gets_rows_that_it_accepts(capsys: Capture, tmp_path: Path) -> None:
    own = ("--gpus-per-node", "4", "--gpu", "a100")
    found = advice(capsys, SMALL, *own, "--write", str(tmp_path / "plan.json"))
    titles = [title for row in found["advice"] for title in row["best_at"]]
    assert titles.count("fastest") == titles.count("same bits") == 1 and len(found["advice"]) <= 6
    assert found["worth_it"] and sum(found["job"]["idle"].values()) > 0.1
    check_rows(capsys, found, SMALL, *own)
    best = found["advice"][found["best"] - 1]
    job = [*changed(SMALL, ["--zero-bubble-schedule"], best["leave_out"]), str(tmp_path / "plan.json")]
    layout = [word for word in best["flags"] if "|" in word]
    assert layout or main(["dry-run", *own, "--megatron-lm", "--", *job]) == 0, capsys.readouterr().err


def test_schedules_by_name_are_accepted(capsys: Capture) -> None:
    own = ("--gpus-per-node", "4", "--gpu", "a100")
    found = advice(capsys, SMALL, *own, "--quick")
    assert found["worth_it"] and {"fastest", "same bits"} <= {
        each for row in found["advice"] for each in row["best_at"]
    }
    check_rows(capsys, found, SMALL, *own)
    least, most = found["gain_range"]
    assert 0 < least < found["advice"][found["best"] - 1]["gain"] < most < 1


@pytest.mark.parametrize(
    ("layers", "measured"),
    [
        ("--num-layers 8", True),
        ("--num-layers 4", False),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", False),
    ],
)
def test_changes_have_layers_for_every_stage(capsys: Capture, tmp_path: Path, layers: str, measured: bool) -> None:
    """Twelve stages need ten layers, and eight need six; what a job cannot have is not tried."""
    flags = changed(SMALL, layers.split(), ())
    file = tmp_path / "costs.json"
    costs = {key: [1.0, 1.0, 1.0, 2.0] for key in ("forward_ms", "backward_ms", "wgrad_ms")}
    file.write_text(json.dumps(costs | {"layers_per_stage": [2] * 4}))
    found = advice(capsys, flags, "--gpus-per-node", "4", "--quick", *(["--costs", str(file)] if measured else []))
    most = {"--num-layers 8": 2, "--num-layers 4": 1}.get(layers, 2)
    assert found["advice"] and all(row["num_chunks"] <= most for row in found["advice"])


def test_sequences_are_cut_by_measured_costs(capsys: Capture, tmp_path: Path) -> None:
    """Two long microbatches on four ranks; slices may be as short as the run has measured."""
    file = tmp_path / "costs.json"
    costs: dict[str, Any] = {key: [1.0] * 4 for key in ("forward_ms", "backward_ms", "wgrad_ms")}
    file.write_text(json.dumps(costs | {"sequence_length": 2048, "least_slice_tokens": 256}))
    found = advice(
        capsys,
        [*SMALL, "--global-batch-size", "2"],
        "--gpus-per-node",
        "4",
        "--costs",
        str(file),
        "--memory-limit",
        "1p",
    )
    best = found["advice"][found["best"] - 1]
    assert best["name"] == "zb-auto loop x2, slices" and best["gain"] > 0.58
    assert best["environment"] == ["CUDA_DEVICE_MAX_CONNECTIONS=32"], "with fewer queues it is longer"
    assert any(row["name"] == "seq-zb-h1, slices" for row in found["advice"]), "without a search"
    ends = best["flags"][best["flags"].index("--zero-bubble-slices") + 1].split(",")
    assert int(ends[0]) == 256 and int(ends[-1]) == 2048


def test_text_says_what_to_add_and_what_to_leave_out(capsys: Capture) -> None:
    flags = [*SMALL, "--num-virtual-stages-per-pipeline-rank", "2"]
    assert main(["advise", "--quick", "--gpus-per-node", "4", "--", *flags]) == 0
    out = capsys.readouterr().out
    assert "The job as it is: interleaved-1f1b, 4 pipeline ranks, 16 microbatches, 1 data-parallel replicas" in out
    last, limits, measure = out.splitlines()[-3:]
    assert measure.startswith("These are estimates. To measure, run the job with --zero-bubble-schedule zb-interleaved")
    assert limits.startswith("No figure or range covers the host's time for its launches, ranks that slow each other")
    assert last.startswith("Add --zero-bubble-schedule") and "% of the time of the passes" in last
    assert "the best at\n1  " in out and "% of a lower bound on such plans\n" in out
    assert "if all F, B, W or transfers take 20% more or less)" in last


@pytest.mark.usefixtures("short_searches")
def test_weights_are_sharded_for_memory(capsys: Capture) -> None:
    """Wide layers on few tokens: weights take most of the memory."""
    sizes = "--num-layers 32 --hidden-size 8192 --num-attention-heads 64 --seq-length 1024 --global-batch-size 64"
    flags = changed(SMALL, [*sizes.split(), "--use-distributed-optimizer"], ())
    own = ("--nodes", "4", "--gpu", "h100")
    found = advice(capsys, flags, *own, "--network-bandwidth", "400")
    (row,) = (row for row in found["advice"] if "--zero-bubble-shard-weights" in row["flags"])
    assert "least memory" in row["best_at"] and row["bits"] == NUMBERS["rounded differently"]
    weights = 32 / 4 * 12 * 8192**2  # of the layers of a rank, a part of whose stages is whole at a time
    whole = int(row["flags"][row["flags"].index("--zero-bubble-whole-stages") + 1]) / row["num_chunks"]
    static = weights * ((2 + 4 + 12) / 8 + whole * (2 + 4))
    assert static < row["memory_bytes"] < 0.95 * found["job"]["memory_bytes"] and row["gain"] > 0
    slow = advice(capsys, flags, *own, "--link-bandwidth", "5")  # that of replicas, which share a node
    assert all(each["gain"] < 0 for each in slow["advice"] if "--zero-bubble-shard-weights" in each["flags"])
    check_rows(capsys, {"advice": [row]}, flags, *own, "--network-bandwidth", "400")


def test_no_memory_is_no_advice_to_take_more(capsys: Capture) -> None:
    """No row needs more than the GPU has, or than the job takes today."""
    found = advice(capsys, SMALL, "--quick", "--gpus-per-node", "4", "--gpu-memory", "2GiB")
    assert all(row["memory_bytes"] <= found["job"]["memory_bytes"] * (1 + 1e-9) for row in found["advice"])


@pytest.mark.full
def test_other_sizes_may_change(capsys: Capture) -> None:
    flags = [*SMALL, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    own = ("--gpus-per-node", "4", "--may-change", "recompute")
    found = advice(capsys, flags, *own)
    rows = [row for row in found["advice"] if "no recomputation" in row["name"]]
    assert rows and all("--recompute-granularity" in row["leave_out"] and row["gain"] > 0.1 for row in rows)
    check_rows(capsys, found, flags, "--gpus-per-node", "4")


@pytest.mark.full
def test_only_some_layers_may_be_computed_again(capsys: Capture) -> None:
    """As many as the memory asks for: never longer than all of them, or none where that fits."""
    flags = [*SMALL, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    own, best = ("--gpus-per-node", "4", "--quick", "--may-change", "recompute"), []
    for memory in ("3.2GiB", "3.6GiB", "80GiB"):
        found = advice(capsys, flags, *own, "--gpu-memory", memory)
        alone = advice(capsys, flags, *own[:3], "--gpu-memory", memory)
        best.append(min(found["advice"], key=lambda row: row["makespan_ms"]))
        assert best[-1]["makespan_ms"] <= min(row["makespan_ms"] for row in alone["advice"])
        check_rows(capsys, found, flags, *own[:2])
    assert best[0]["name"].startswith("recomputation of ") and best[-1]["name"].startswith("no recomputation")


def test_flags_to_leave_out_are_listed_once() -> None:
    for change in random_pipeline(1)[0].changes():
        assert len(set(change.drops)) == len(change.drops), change.name


def test_rows_are_certified_while_there_is_time() -> None:
    """A bound with the memory limit is tighter than one in closed form."""
    pipeline, today = random_pipeline(1)
    changes = list(pipeline.named_changes())
    adviser = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01)
    own = adviser.advise(changes).rows
    assert own and all(row.gap is not None and row.plan.certificate is not None for row in own)
    certified = [max(0.0, row.plan.certificate.gap(row.plan.timeline)) for row in own if row.plan.certificate]
    assert all(row.gap <= gap + 1e-12 for row, gap in zip(own, certified, strict=True) if row.gap is not None)


def test_bounds_are_below_plans() -> None:
    """What a search is left out for is a lower bound on its plan."""
    pipeline, today = random_pipeline(7)
    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01)
    for change in pipeline.changes():
        if change.searches and not change.question.offloading:
            plan = answer(replace(change.question, limit=2 * (change.question.limit or 0.0)))
            assert adviser._least(change) <= plan.timeline.makespan_ms * (1 + 1e-9), change.name


def test_a_job_that_measures_records_what_it_measures(capsys: Capture) -> None:
    """The printed flags end a job of any length after ten iterations, of which it has recorded the last ones."""
    flags = [*SMALL, "--train-iters", "500000"]
    assert main(["advise", "--quick", "--gpus-per-node", "4", "--", *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("These are estimates."))
    added = line.partition("run the job with ")[2].partition(" added")[0].split()
    args = checked_megatron_job([*flags, *added], 4, 4).args
    assert args.run.observations.record_costs == "costs.json"
    assert end_of_run(1, args.train_iters, args.exit_interval) == 10 > LAST_ITERATIONS
    assert end_of_run(12_001, args.train_iters, args.exit_interval) == 12_010
