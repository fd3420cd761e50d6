"""Tests of ``advise``: what it says of published recipes, that it finds the best, and that a job accepts its flags."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, PassMemory
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.adapter.tracer import LAST_ITERATIONS, end_of_run
from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.cli.job_runs import SEVERAL
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.costs.layers import LayerCosts, Part
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.ir.queues import HardwareQueues
from megatron.zero_bubble.job.changes import Pipeline
from megatron.zero_bubble.plan.timelines import timeline_of
from megatron.zero_bubble.planning.advice import Adviser, Setting, Tried
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import NUMBERS, Row, Today, need_of
from megatron.zero_bubble.planning.cuts import Cuts
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.question import Offloading, Question
from megatron.zero_bubble.planning.vocabulary import variants
from megatron.zero_bubble.schedules import SCHEDULES, build
from tests.helpers.recipes import COMMON, RECIPES
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


def check_rows(capsys: Capture, found: dict[str, Any], flags: list[str], *own: str) -> None:
    """A dry run accepts the flags of every row, and gives it the same time and memory."""
    for row in found["advice"]:
        job = changed(flags, row["flags"], row["leave_out"])
        with pytest.MonkeyPatch.context() as patch:
            for variable in row["environment"]:
                patch.setenv(*variable.split("="))
            code = main(["dry-run", *own, "--megatron-lm", "--", *job])
        out, err = capsys.readouterr()
        assert code == 0, f"{row['name']}: {err}"
        if "--zero-bubble-offload" in row["flags"]:
            continue  # what moves is planned from measured copies
        assert f", {row['makespan_ms']:,.1f} ms, bubble " in out, row["name"]
        if row["memory_bytes"] is not None:
            table = out[out.index("pipeline rank ") :].partition("\n\n")[0].splitlines()[1:]
            totals = [float(line.split()[-1]) for line in table]
            assert max(totals) == pytest.approx(row["memory_bytes"] / 2**30, abs=0.051), row["name"]


def check_trained(found: dict[str, Any], flags: list[str], name: str) -> None:
    """``tests/megatron_lm/test_recipes.py`` trains a small job with the change of every row."""
    trained = {
        (row.flags, frozenset(row.drops.split()) & frozenset(flags), NUMBERS[row.numbers])
        for row in SMALL_JOBS[name].rows
    }
    for row in found["advice"]:
        assert (" ".join(row["flags"]), frozenset(row["leave_out"]), row["bits"]) in trained, row["name"]


def job_of(name: str) -> tuple[list[str], tuple[str, ...]]:
    recipe = RECIPES[name]
    return shlex.split(f"{COMMON} {recipe.flags}"), ("--nodes", str(recipe.nodes), "--gpu", recipe.gpu)


@pytest.mark.parametrize("name", RECIPES)
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
@pytest.mark.parametrize("queues", ["1", None])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_run_as_they_are_advised(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str, queues: str | None
) -> None:
    """With searches: where the launch script sets the hardware queues, and where CUDA's default holds."""
    set_queues(monkeypatch, queues)
    flags, own = job_of(name)
    found = advice(capsys, flags, *own)
    check_rows(capsys, found, flags, *own)


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


def set_queues(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if number is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", number)


def test_what_needs_more_queues_says_so_or_drops_out() -> None:
    """Megatron's own schedules need no proof."""
    pipeline, today = random_pipeline(17)
    one, several = (HardwareQueues(number, "", f"there are {number} queues", "32") for number in (1, 32))
    settings = Setting(Feasibility(one, "late")), Setting(Feasibility(several, "late"), (SEVERAL,))
    changes = [change for change in pipeline.named_changes() if change.question.schedule == "breadth-first"]
    stock = [change for change in pipeline.named_changes() if not change.is_ours]
    advisers = [
        Adviser(today, "makespan", None, lambda *_: None, 0.01, settings=settings[:number]) for number in (1, 2)
    ]
    for adviser in advisers:
        adviser.advise([*changes, *stock])
    assert changes and [len(adviser.rows) for adviser in advisers] == [len(stock), len(changes) + len(stock)]
    assert all("needs several hardware queues" in each.reason for each in advisers[0].dropped)
    assert {row.environment for row in advisers[1].rows if row.change.is_ours} == {(SEVERAL,)}


def test_a_row_has_the_figures_of_its_dry_run() -> None:
    """One that the dry run refuses drops out, and the next best is tried."""
    pipeline, today = random_pipeline(1)
    refused: list[str] = []

    def messages(row: Row) -> tuple[float, ...]:
        return (1.0,) * len(row.need.activations)

    def tried(row: Row) -> Tried:
        if not refused or row.change.name == refused[0]:
            refused.append(row.change.name)
            raise UserError("not this one")
        return Tried(row.plan.timeline, replace(row.need, messages=messages(row)), None)

    adviser = Adviser(today, "makespan", None, lambda *_: None, 0.01, tried=tried)
    found = adviser.advise(pipeline.named_changes())
    assert refused[0] not in {row.change.name for row in found.rows} and len(found.rows) > 0
    assert [each.reason for each in found.dropped if each.name == refused[0]] == ["not this one"]
    assert all(row.need.messages == messages(row) for row in found.rows)


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
    job = [*TENSOR, "--tp-comm-overlap"]
    assert main(["advise", "--quick", "--gpus-per-node", "8", "--", *job]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "more changes are refused for one reason: " in line)
    assert "tp_comm_bulk_wgrad" in line and "--disable-tp-comm-bulk-wgrad" in line
    assert "no change gains anything" not in out


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
    assert best["name"] == "seq-zb-h1, slices" and best["gain"] > 0.4
    ends = best["flags"][best["flags"].index("--zero-bubble-slice-ends") + 1].split(",")
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


@pytest.mark.parametrize(
    ("own", "job", "words"),
    [
        ([], ["--pipeline-model-parallel-size", "1"], "advice is about pipelines of 2 or more ranks; got"),
        (["--may-change", "layers"], [], "--may-change takes micro-batch-size, recompute, pipeline; got 'layers'"),
        (["--may-change", "pipeline", "--costs", "none.json"], [], "none.json"),
        (["--gpu-memory", "1p"], [], "--gpu-memory needs a size in bytes, such as 80GiB; got 1p"),
        (["--gpu-memory", "80"], [], "--gpu-memory needs a size in bytes, such as 80GiB; got 80; write 80GiB"),
        (["--host-bandwidth", "0"], [], "--host-bandwidth"),
        (["--row", "9", "--write", "x.json"], [], "--row must be from 1 to"),
        ([], ["--num-layers", "15"], "--num-layers must be divisible by the number of pipeline stages, got 15"),
        ([], ["--zero-bubble-schedule", "zb-vv"], "zb-vv"),
    ],
)
def test_errors_are_sentences(capsys: Capture, own: list[str], job: list[str], words: str) -> None:
    assert main(["advise", "--quick", "--gpus-per-node", "4", *own, "--", *SMALL, *job]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--", "run.sh"], "what follows -- must be the flags of the job, which begin with --; got run.sh; give the"),
        (["run.sh", *SMALL], "got run.sh; give the flags themselves"),
        (
            ["--", " ".join(SMALL)],
            "got '--num-layers 16 --hidden-size 1024 --num' and more in one; leave out the quotes",
        ),
        (["--", "--num-layers", "8"], "give them as flags"),
        (["--gpu-memory", "80G", "--", *SMALL], "got 80G; write 80GiB"),
    ],
)
def test_other_words_than_flags_are_refused_with_a_remedy(capsys: Capture, words: list[str], sentence: str) -> None:
    assert main(["advise", "--quick", "--gpus-per-node", "4", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_configuration_file_of_our_loop_is_read(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    pairs = zip(SMALL, [*SMALL[1:], "--"], strict=True)
    given = {word[2:]: value for word, value in pairs if word.startswith("--")}
    file.write_text(
        "".join(f"{name}: {'true' if value.startswith('--') else value}\n" for name, value in given.items())
    )
    command = ["advise", "--quick", "--gpus-per-node", "4", "--format", "json", "--"]
    assert main([*command, "--config", str(file)]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main([*command, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert main([*command, "--config", str(file)]) == 2
    assert "which describes a model for another library; write its sizes as flags" in capsys.readouterr().err


def test_flags_of_a_job_are_needed(capsys: Capture) -> None:
    for words in (["--nodes", "2"], ["--nodes", "2", "--"]):
        assert main(["advise", *words]) == 2
        assert "come last, after a separate --; got none" in capsys.readouterr().err


@pytest.mark.full
def test_other_sizes_may_change(capsys: Capture) -> None:
    flags = [*SMALL, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    own = ("--gpus-per-node", "4", "--may-change", "recompute")
    found = advice(capsys, flags, *own)
    row = found["advice"][0]
    assert "no recomputation" in row["name"] and "--recompute-granularity" in row["leave_out"]
    check_rows(capsys, found, flags, "--gpus-per-node", "4")


def random_pipeline(seed: int) -> tuple[Pipeline, Today]:
    """A small job with uneven layers, a large output layer, and little or much memory."""
    draw = random.Random(seed)
    ranks, count = draw.choice((2, 3, 4)), draw.choice((2, 4, 6, 8))
    layer = Part(
        draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0.2, 2), 2.0**20, draw.uniform(0.2, 1) * 2**20
    )
    loss = Part(*(draw.uniform(0, 3) for _ in range(3)), 2.0**20, 2.0**19)
    layers = LayerCosts((layer,) * (2 * ranks), Part(), loss, comm_ms=draw.choice((0.0, 0.1)))
    division = Division(2 * ranks)

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        return layers.on(division.on(placement))

    costs = Figures(ranks, count, on, True, layers=layers, division=division, most_layers=2, sequence=4096)
    schedule = build("1f1b", num_ranks=ranks, num_microbatches=count)
    timeline = timeline_of(schedule, *on(schedule.placement))
    limit = draw.choice((1.0, 2.0)) * costs.limit("1p")
    return Pipeline(schedule.placement, costs, limit, "makespan", 1e6), Today(timeline, costs, need_of(timeline, costs))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 1 else pytest.mark.full) for seed in range(50)]
)
def test_pruned_search_finds_what_all_questions_find(seed: int) -> None:
    """No plan of any change is shorter than the fastest row, or takes less memory than that with the least."""
    pipeline, today = random_pipeline(seed)
    pipeline = replace(pipeline, effort=0.03)  # as the run decides
    adviser = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01)
    rows = adviser.advise(pipeline.changes()).rows
    best, least = today.timeline.makespan_ms, today.need.most
    for change in pipeline.changes():
        try:
            plan = answer(change.question)
        except UserError:
            continue
        need = need_of(plan.timeline, plan.costs)
        if need.most <= pipeline.limit * (1 + 1e-9):
            best = min(best, plan.timeline.makespan_ms)
            least = least if change.searches else min(least, need.most)
    found = {title: row for row in rows for title in row.titles}
    fastest = min([today.timeline.makespan_ms, *(row.ms for row in rows)])
    assert best * (1 - 2e-6) <= fastest <= 1.005 * best  # of plans that are as long, the one with less memory
    assert ("least memory" not in found) or found["least memory"].need.most <= least * (1 + 2e-6)


def single_features(pipeline: Pipeline) -> Iterator[Question]:
    """What ``plan`` is asked, one feature at a time."""
    costs, limit = pipeline.costs, pipeline.limit
    whole = Question(costs, limit=limit, objective="makespan", effort=pipeline.effort)
    yield whole
    yield replace(whole, costs=costs.evenly(), by_cost=True)
    yield replace(whole, variants=variants(costs, "auto"))
    yield replace(whole, offload=Offloading("auto", (limit,), limit, bytes_per_ms=pipeline.host_bandwidth))
    for name, recipe in SCHEDULES.items():
        if recipe.sliced and recipe.shape == "linear":
            yield replace(whole, schedule=name, slices=Cuts(None))
        elif not (recipe.sliced or recipe.has_units or recipe.only_compared):
            yield replace(whole, schedule=name)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 20 else pytest.mark.full) for seed in range(200)]
)
def test_joint_search_is_never_worse_than_one_feature(seed: int) -> None:
    """No feature alone, as ``zero-bubble plan`` would plan it, is faster within the memory than the fastest row."""
    pipeline, today = random_pipeline(1000 + seed)
    pipeline = replace(pipeline, effort=0.03)
    rows = Adviser(today, "makespan", pipeline.limit, lambda *_: None, 0.01).advise(pipeline.changes()).rows
    fastest = min([today.timeline.makespan_ms, *(row.ms for row in rows)])
    for question in single_features(pipeline):
        try:
            plan = answer(question)
        except UserError:
            continue
        if need_of(plan.timeline, plan.costs).most <= pipeline.limit * (1 + 1e-9):
            assert fastest <= 1.005 * plan.timeline.makespan_ms, question.schedule


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
        if change.searches and not change.question.offload:
            plan = answer(replace(change.question, limit=2 * (change.question.limit or 0.0)))
            assert adviser._least(change) <= plan.timeline.makespan_ms * (1 + 1e-9), change.name


def test_a_job_that_measures_records_what_it_measures(capsys: Capture) -> None:
    """The printed flags end a job of any length after ten iterations, of which it has recorded the last ones."""
    flags = [*SMALL, "--train-iters", "500000"]
    assert main(["advise", "--quick", "--gpus-per-node", "4", "--", *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("These are estimates."))
    added = line.partition("run the job with ")[2].partition(" added")[0].split()
    args = checked_megatron_job([*flags, *added], 4, 4).args
    assert args.zero_bubble_record_costs == "costs.json"
    assert end_of_run(1, args.train_iters, args.exit_interval) == 10 > LAST_ITERATIONS
    assert end_of_run(12_001, args.train_iters, args.exit_interval) == 12_010


def test_unknown_flags_are_named(capsys: Capture) -> None:
    flags = [*SMALL, "--use-mcore-models", "--pipline-model-parallel-size", "8", "--recompute-granulrity", "full"]
    command = ["--gpus-per-node", "4", "--", *flags]
    assert main(["advise", "--quick", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    unknown = "--use-mcore-models --pipline-model-parallel-size --recompute-granulrity"
    said = [
        f"Not checked here, only by Megatron-LM: {unknown}",
        "--pipline-model-parallel-size is no flag that is known here; did you mean --pipeline-model-parallel-size?",
        "--recompute-granulrity is no flag that is known here; did you mean --recompute-granularity?",
    ]
    assert [line for line in lines if line in said] == said
    assert main(["dry-run", "--megatron-lm", *command]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in said] == said
    assert main(["advise", "--quick", "--format", "json", *command]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["not_read"] == unknown.split()


def test_the_vocabulary_is_that_of_the_tokenizer(capsys: Capture, tmp_path: Path) -> None:
    at = SMALL.index("--vocab-size")
    rest = [*SMALL[:at], *SMALL[at + 2 :]]
    rest = [word for word in rest if word not in ("--tokenizer-type", "NullTokenizer")]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128_256}))
    asks = "Megatron-LM asks the tokenizer"
    for flags, note in (
        (["Llama2Tokenizer"], "The vocabulary of 32,000 is that of Llama2Tokenizer, padded."),
        (
            ["HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)],
            f"The vocabulary of 128,256 is that of {tmp_path / 'config.json'}, padded.",
        ),
        (
            ["HuggingFaceTokenizer"],
            f"A vocabulary of 50,304 is assumed, since {asks}: give --vocab-size, because gains depend on it.",
        ),
    ):
        assert main(["dry-run", "--megatron-lm", "--gpus-per-node", "4", "--", *rest, "--tokenizer-type", *flags]) == 0
        assert note in capsys.readouterr().out.splitlines()
