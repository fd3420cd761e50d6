"""Plans that hide the all-to-all of experts: what is chosen, compared, printed and refused."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from bench.experts import COSTS, SCALES, costs_file
from megatron.zero_bubble import Schedule, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.errors import Refusal, UserError, attempted
from megatron.zero_bubble.core.formats.plan import plan_from_json
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.advice import Adviser, StartedWith
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import AdviceRow, Change, Today, need_of
from megatron.zero_bubble.planning.exclusions import PAIRS, refuse_excluded
from megatron.zero_bubble.planning.experts import contenders, verdict
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import measured
from megatron.zero_bubble.planning.job.changes import JobChanges
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.options import check_options, flag_of
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.ranges import RANGES
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Named, Setup, Validated
from megatron.zero_bubble.planning.worth import Advice
from tests.helpers.rows import some

SMALL = (4, 16, 4)
SIZES = ((8, 32, 8), (16, 32, 4), (16, 64, 4), SMALL)
FLAGS = f"--costs {COSTS} --num-ranks 4 --num-microbatches 8"


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "layers"), some(SIZES, SMALL))
@pytest.mark.parametrize("num_chunks", [2, 4])
@pytest.mark.parametrize("scale", SCALES)
def test_no_plan_with_pairs_is_longer_than_megatrons_combined_schedule(
    scale: float | None, num_chunks: int, num_ranks: int, num_microbatches: int, layers: int
) -> None:
    """With as many stages per rank, in its memory: for every share of the all-to-all."""
    figures = measured(costs_file(scale, layers), num_ranks, num_microbatches)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    combined = build("interleaved-1f1b", **sizes, pairs=True)
    stock = simulate(combined, *figures.on(combined.placement))
    limit = max(stock.peak_activation) * figures.microbatch
    made = answer(Question(figures, Setup(Named("interleaved-1f1b", num_chunks), pairs=True), limit))
    assert made.timeline.makespan_ms <= stock.makespan_ms
    assert max(made.timeline.peak_activation) <= max(stock.peak_activation)
    assert made.schedule.pairs and made.certificate is None
    plan_of(made.schedule)


def test_a_small_all_to_all_is_better_with_split_backwards_alone() -> None:
    """And a large one with fused ones, beneath whose weight gradients it runs."""
    split, fused = (
        answer(
            Question(measured(costs_file(scale, 4), 4, 8), Setup(Named("dualpipe-v"), pairs=True, step=Validated()))
        ).schedule
        for scale in (0.25, None)
    )
    alone = [
        [p for row in of.order for p in row if p.kind is Kind.BW and not any(p == b for b in _backwards_in_pairs(of))]
        for of in (split, fused)
    ]
    assert not alone[0] and alone[1]


def _backwards_in_pairs(schedule: Any) -> set[Any]:
    return {row[at + 1] for row in schedule.order for at, p in enumerate(row) if p in schedule.pairs}


def test_the_sentence_says_the_share_and_which_kind_is_shortest() -> None:
    exposed, small = (measured(costs_file(scale, 4), 16, 64) for scale in (None, 0.25))
    assert [each.what.split()[0] for each in contenders(exposed, "span")] == ["Megatron's", "dualpipe-v", "zb-v"]
    assert [each.what.split()[0] for each in contenders(small, "span")] == ["Megatron's", "zb-v", "dualpipe-v"]
    assert verdict(exposed, "span").startswith(
        "all-to-all of experts: 52% of a microbatch if nothing hides it; shortest span: Megatron's combined "
        "schedule (interleaved-1f1b x4 with pairs): 9,676."
    )


def pairs_of(limit: float = math.inf) -> tuple[list[Change], Today]:
    """The changes to pairs of a job with long all-to-alls."""
    costs = measured(costs_file(None, 4), 4, 8)
    schedule = costs.build("1f1b")
    timeline = timeline_of(schedule, *costs.on(schedule.placement))
    pipeline = JobChanges(schedule.placement, costs, limit, 1e6)
    changes = [change for change in pipeline.named_changes() if change.question.setup.pairs]
    return changes, Today(timeline, costs, need_of(timeline, costs))


def test_shorter_plans_that_cannot_run_are_barred_with_the_reason() -> None:
    """The shortest of those that hardware queues refuse, or that are above a limit."""
    changes, today = pairs_of()
    ms = {row.change.name: row.ms for row in advised(changes, today)[1]}
    assert {"interleaved-1f1b x2 with pairs", "dualpipe-v with pairs"} <= set(ms)
    reason = "Megatron-LM wants CUDA_DEVICE_MAX_CONNECTIONS=1"
    one = StartedWith(Feasibility(HardwareQueues(1, "one hardware queue per GPU", reason, None)))
    found, _ = advised([change for change in changes if change.name == "dualpipe-v with pairs"], today, settings=(one,))
    assert not found.rows and found.barred == (("dualpipe-v with pairs", ms["dualpipe-v with pairs"], ANY),)
    assert reason in found.barred[0].why
    tight = max(today.need.activations) / 2
    found, _ = advised(changes, today, most_activations=tight)
    (barred,) = found.barred
    assert barred[:2] == min(ms.items(), key=lambda each: each[1]) and "above the limit of" in barred.why
    assert not advised(changes, today)[0].barred


def test_jobs_of_other_sizes_have_pairs_too() -> None:
    """Such as one without full recomputation."""
    changes, today = pairs_of()
    pipeline = JobChanges(today.timeline.schedule.placement, today.costs, math.inf, 1e6)
    names = {change.name for change in pipeline.quick_changes(today.timeline.schedule)}
    assert {change.name for change in changes} <= names


def advised(changes: list[Change], today: Today, **more: Any) -> tuple[Advice, list[AdviceRow]]:
    adviser = Adviser(today, "span", None, lambda *_: None, 0.01, **more)
    return adviser.advise(changes), adviser.rows


@pytest.mark.parametrize("rule", [row for row in RANGES if row.choice is PAIRS], ids=lambda rule: rule.option)
def test_a_broken_rule_of_pairs_has_its_remedy(rule: Any) -> None:
    broken = {
        "expert_model_parallel_size": 1,
        "moe_token_dispatcher_type": "allgather",
        "recompute_granularity": "full",
        "moe_shared_expert_overlap": True,
        "mtp_num_layers": 2,
        "recompute_modules": ["mlp", "moe"],
        "bf16": False,
    }
    paired = RunOptions(Setup(Named("dualpipe-v"), pairs=True))
    refused = attempted(
        partial(check_options, SimpleNamespace(fp16=False, **{rule.option: broken[rule.option]}), paired)
    )
    remedy = rule.flags(broken[rule.option])
    assert isinstance(refused, Refusal) and refused.reason.endswith(rule.remedy) and refused.remedy == remedy
    if remedy is not None:
        flag, *values = (*remedy.adds, *remedy.drops)
        assert flag == flag_of(rule.option)
        kept = values[:1] if rule.option == "recompute_modules" else values[0] if remedy.adds else None
        check_options(SimpleNamespace(**{rule.option: kept}), paired)


def test_plan_and_compare_with_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan --schedule dualpipe-v --pairs {FLAGS} --memory-limit 2p".split()) == 0
    printed = capsys.readouterr().out
    assert "dualpipe-v with pairs: 4 ranks" in printed
    assert "all-to-all of experts: 52% of a microbatch" in printed
    assert "memory limit 8 microbatches: met" in printed and "lower bound" not in printed
    assert main(f"compare --pairs --equal-passes --max-chunks 2 --memory-limit 2p {FLAGS}".split()) == 0
    table = capsys.readouterr().out
    first = next(line for line in table.splitlines() if line.startswith(("interleaved", "dualpipe", "zb-")))
    assert "with pairs" in first and "zb-v with overlap" in table and "has a span below" not in table
    assert "all-to-all of experts: 52% of a microbatch" in table


@pytest.mark.parametrize(("name", "key"), [("dualpipe-v", None), ("zb-v", True)])
def test_the_plan_file_has_what_overlaps(
    name: str, key: bool | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(f"plan --schedule {name} --pairs {FLAGS} --format json".split()) == 0
    text = capsys.readouterr().out
    assert json.loads(text).get("overlap_experts") is key
    schedule = plan_from_json(text).schedule
    assert schedule.overlaps and bool(schedule.pairs) == (key is None)
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(f"plan --schedule-file {file} --costs {COSTS} --format json".split()) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["span_ms"] == json.loads(text)["span_ms"] and again["order"] == json.loads(text)["order"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--schedule seq-1f1b", "pairs and sequence slices exclude each other"),
        ("--schedule zero-pp --shard-weights", "pairs and sharded units exclude each other"),
        ("--schedule-file plan.json", "--pairs does not apply to a schedule file"),
    ],
)
def test_what_excludes_pairs_is_refused(flags: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {flags} --pairs {FLAGS}".split()) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_schedule_without_pairs_needs_to_know_the_all_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    times = "--forward-ms 3 --backward-ms 2 --wgrad-ms 2 --num-ranks 4 --num-microbatches 8"
    assert main(f"plan --schedule zb-v --pairs {times}".split()) != 0
    assert "schedule 'zb-v' has no pairs of a forward and a backward" in capsys.readouterr().err
    assert main(f"plan --schedule 1f1b --pairs {times}".split()) == 0
    with pytest.raises(UserError, match="pairs and vocabulary parallelism exclude each other"):
        refuse_excluded(RunOptions(Setup(pairs=True, vocabulary=Divided(1))))


def test_estimate_of_a_model_has_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From ``--config``: by the bandwidths, and with what is assumed."""
    file = tmp_path / "experts.yaml"
    shapes = "hidden-size: 1024\nnum-attention-heads: 16\nseq-length: 2048\nmicro-batch-size: 1\nswiglu: true\n"
    experts = "num-experts: 64\nmoe-router-topk: 8\nmoe-ffn-hidden-size: 512\nmoe-token-dispatcher-type: alltoall\n"
    file.write_text(
        f"{shapes}{experts}num-layers: 16\nexpert-model-parallel-size: 16\npipeline-model-parallel-size: 4\n"
        "global-batch-size: 16\n"
    )
    plan = ["plan", "--config", str(file), "--schedule", "dualpipe-v", "--pairs"]

    def share(*more: str) -> int:
        assert main([*plan, *more]) == 0
        out = capsys.readouterr().out
        assert "dualpipe-v with pairs" in out and "Experts are assumed to be balanced: 8 of 64" in out
        return int(out.partition("all-to-all of experts: ")[2].partition("%")[0])

    slow = share()
    assert slow > share("--network-bandwidth", "100") > share("--gpus-per-node", "16") > 0
    assert share("--gpus-per-node", "16", "--link-bandwidth", "25") > slow
    assert main([*plan, "--shard-weights"]) == 2
    capsys.readouterr()
    assert main(["plan", "--config", str(file), "--schedule", "zb-v", "--shard-weights"]) == 2
    assert "--replicas must be a multiple of 16" in capsys.readouterr().err
    assert main(["plan", *FLAGS.split(), "--schedule", "zb-v", "--link-bandwidth", "1"]) == 2
    assert "--link-bandwidth requires --config" in capsys.readouterr().err
    file.write_text(f"{shapes}{experts}num-layers: 16\nexpert-model-parallel-size: 5\n")
    assert main(plan) == 2
    assert "--num-experts must be divisible by --expert-model-parallel-size, got 64 and 5" in capsys.readouterr().err
    file.write_text(f"{shapes}{experts}num-layers: 16\nexpert-model-parallel-size: 0\n")
    assert main(plan) == 2
    assert "--expert-model-parallel-size must be 1 or more; got 0" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["loop --num-chunks 2", "vee"])
def test_a_search_for_pairs_is_not_longer_than_the_schedules_by_name(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(flags: str) -> tuple[float, Schedule]:
        assert main(f"plan {flags} --pairs {FLAGS} --memory-limit 2p --format json".split()) == 0
        text = capsys.readouterr().out
        return json.loads(text)["makespan_ms"], plan_from_json(text).schedule

    ms, found = planned(f"--schedule zb-auto --placement {where}")
    named, _ = planned("--schedule dualpipe-v" if where == "vee" else "--schedule interleaved-1f1b --num-chunks 2")
    assert found.name == "zb-auto with pairs" and found.pairs and ms < named


def test_a_run_refuses_to_search_for_pairs() -> None:
    with pytest.raises(UserError, match="overlap_experts works only with a schedule by name or from a file"):
        _ = ZeroBubbleConfig("zb-auto", placement="vee", overlap_experts=True).setup
