"""Plans that hide the all-to-all of experts: what is chosen, compared, printed and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.experts import COSTS, SCALES, costs_file
from megatron.zero_bubble import simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import _refusal
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import plan_from_json
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.advice import StartedWith
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import need_of
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.experts import contenders, verdict
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.figures import Figures, measured
from megatron.zero_bubble.planning.job.options import _NEEDED_BY_PAIRS
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Divided, Named, Setup, Validated
from tests.helpers.rows import some

SMALL = (4, 16, 4)
SIZES = ((8, 32, 8), (16, 32, 4), (16, 64, 4), SMALL)
FLAGS = f"--costs {COSTS} --num-ranks 4 --num-microbatches 8"

ANY = StartedWith(Feasibility())
"""Of a job whose GPUs run every schedule."""


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


@pytest.mark.parametrize("rule", _NEEDED_BY_PAIRS, ids=lambda rule: rule.option)
def test_only_what_the_job_can_run_is_the_shortest(rule: Any) -> None:
    """Where a rule for pairs is broken, the sentence says what stands in the way."""
    costs = measured(costs_file(None, 4), 16, 64)
    broken = {
        "expert_model_parallel_size": 1,
        "moe_token_dispatcher_type": "allgather",
        "recompute_granularity": "full",
        "moe_shared_expert_overlap": True,
        "mtp_num_layers": 2,
        "recompute_modules": ["mlp", "moe"],
    }
    job: Any = SimpleNamespace(costs=costs, read=SimpleNamespace(args=SimpleNamespace()))
    free = verdict(costs, "span", partial(_refusal, job, ANY, None, math.inf))
    assert free == verdict(costs, "span")
    setattr(job.read.args, rule.option, broken[rule.option])
    text, reason = verdict(costs, "span", partial(_refusal, job, ANY, None, math.inf)).split("\n")
    assert "shortest span: zb-v without overlap: " in text and "pairs" not in text
    assert reason.startswith("shorter, but not for this job as it is: Megatron's combined schedule (")
    assert reason.count(" with pairs") == 2 and reason.endswith(rule.remedy)


def test_schedules_that_one_hardware_queue_refuses_are_not_named() -> None:
    costs = measured(costs_file(None, 4), 4, 8)
    job: Any = SimpleNamespace(costs=costs, read=SimpleNamespace(args=SimpleNamespace()))
    reason = "Megatron-LM wants CUDA_DEVICE_MAX_CONNECTIONS=1"
    one = StartedWith(Feasibility(HardwareQueues(1, "one hardware queue per GPU", reason, None)))
    text = verdict(costs, "span", partial(_refusal, job, one, None, math.inf))
    named, _, others = text.partition("shorter, but not for this job as it is: ")
    assert "dualpipe-v with pairs" in verdict(costs, "span", partial(_refusal, job, ANY, None, math.inf))
    assert "dualpipe-v with pairs" not in named
    assert "dualpipe-v with pairs" not in others or reason in others


def test_peaks_are_in_bytes_and_within_the_memory() -> None:
    costs = measured(costs_file(None, 4), 16, 64)
    sized = replace(costs, make=lambda on: (costs.on(on)[0], replace(_memory(costs.on(on)[1]))), memory_given=True)
    job: Any = SimpleNamespace(costs=sized, read=SimpleNamespace(args=SimpleNamespace()))
    assert "GiB" in verdict(sized, "span") and "peak" in verdict(sized, "span")
    peaks = {each.what: each.ms for each in contenders(sized, "span")}
    tight = max(need_of(timeline_of(zb_v(sized), *sized.on(zb_v(sized).placement)), sized).activations)
    text = verdict(sized, "span", partial(_refusal, job, ANY, None, tight))
    assert peaks and "shortest span: zb-v without overlap" in text and "above the limit of" in text


def zb_v(costs: Figures) -> Any:
    return build("zb-v", num_ranks=costs.num_ranks, num_microbatches=costs.num_microbatches)


def _memory(memory: PassMemory) -> PassMemory:
    return PassMemory(*(tuple(2.0**30 for _ in memory.activation) for _ in range(2)))


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
        ("--schedule zb-auto", "pairs and zb-auto exclude each other, because its search does not order pairs"),
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
    assert "--shard-weights needs a model without experts" in capsys.readouterr().err
    assert main(["plan", *FLAGS.split(), "--schedule", "zb-v", "--link-bandwidth", "1"]) == 2
    assert "--link-bandwidth requires --config" in capsys.readouterr().err
    file.write_text(f"{shapes}{experts}num-layers: 16\nexpert-model-parallel-size: 5\n")
    assert main(plan) == 2
    assert "--num-experts must be divisible by --expert-model-parallel-size, got 64 and 5" in capsys.readouterr().err
    file.write_text(f"{shapes}{experts}num-layers: 16\nexpert-model-parallel-size: 0\n")
    assert main(plan) == 2
    assert "--expert-model-parallel-size must be 1 or more; got 0" in capsys.readouterr().err
