"""Tests of ``advise`` for jobs with experts: combined schedules, what stands in their way, and what is gained then."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.advise import changed
from tests.cli.test_advise import SMALL, Capture, advice, check_rows, set_queues
from tests.helpers.recipes import COMMON, DEEPSEEK, KIMI

EXPERTS = [
    *SMALL,
    *"--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2".split(),
]
APART = ("--nodes", "8", "--gpus-per-node", "1")
"""One GPU per node, so that all-to-alls take long."""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def text(capsys: Capture, flags: Sequence[str], *own: str) -> str:
    assert main(["advise", *own, "--", *flags]) == 0
    return capsys.readouterr().out


def check_the_advice_is_what_is_shortest(capsys: Capture, flags: Sequence[str], *own: str) -> None:
    """The sentence on the all-to-all, the first row and the advice have one schedule with pairs, and one length."""
    printed = text(capsys, flags, *own).splitlines()
    (line,) = (line for line in printed if line.startswith("all-to-all of experts: "))
    named = re.search(r"; shortest \w+: (.*?): ([\d,.]+) ms, peak ", line)
    assert named is not None and named[1].rstrip(")").endswith("with pairs"), line
    (row,) = (line for line in printed if re.match(r"1  \S.* [-+]\d", line))
    assert named[2] in row and re.sub(r".*\((.*)\)", r"\1", named[1]) in row, (line, row)
    (last,) = (line for line in printed if line.startswith("Add "))
    assert "--zero-bubble-overlap-experts" in last and "tay with" not in printed


def test_combined_schedules_are_advised(capsys: Capture) -> None:
    check_the_advice_is_what_is_shortest(capsys, EXPERTS, *APART, "--quick")


MODERN = (
    "--qk-layernorm --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 --moe-grouped-gemm --normalization RMSNorm "
    "--disable-bias-linear --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective "
)
PRECISE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --fp8-format e4m3 "
DEEPSEEK_V3 = MODERN + PRECISE + "--moe-layer-freq '([0]*3+[1]*58)' --mtp-num-layers 1 "
SIZES = (
    "--expert-model-parallel-size 32 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 8192 "
)
PUBLISHED = {
    "DeepSeek-V3, 256 H100": (
        "h100",
        DEEPSEEK + DEEPSEEK_V3 + SIZES + "--moe-token-dispatcher-type flex --fp8-recipe blockwise "
        "--recompute-modules mla_up_proj mlp layernorm --optimizer-cpu-offload "
        "--pipeline-model-parallel-layout 'Et*2|(tt|)*22t|(tt|)*7mL'",
    ),
    "DeepSeek-V3, 256 B200": (
        "b200",
        DEEPSEEK + DEEPSEEK_V3 + SIZES + "--moe-token-dispatcher-type flex --fp8-recipe mxfp8 --fp8-param-gather "
        "--reuse-grad-buf-for-mxfp8-param-ag --recompute-modules mlp mla_up_proj "
        "--pipeline-model-parallel-layout 'Et*4|(tttt|)*14tmL'",
    ),
    "Kimi K2, 256 B200": (
        "b200",
        KIMI + MODERN + "--moe-layer-freq '([0]*1+[1]*60)' --recompute-modules mla_up_proj "
        "--expert-model-parallel-size 16 --pipeline-model-parallel-size 16 --micro-batch-size 1 "
        "--global-batch-size 2048 --pipeline-model-parallel-layout 'Et*4|(t*4|)*14tL'",
    ),
}
"""Of Megatron-MoE-ModelZoo (8 x 4 and 8 x 2 stages, 256 microbatches; the first also recomputes "moe") and of
Megatron-Bridge (16 x 1, 128).
"""


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_jobs_are_advised_to_combine_passes(capsys: Capture, name: str) -> None:
    gpu, flags = PUBLISHED[name]
    own = ("--nodes", "32", "--gpu", gpu, "--quick")
    check_the_advice_is_what_is_shortest(capsys, shlex.split(f"{COMMON} {flags}"), *own)


@pytest.mark.full
def test_a_published_job_is_told_what_memory_pairs_need(capsys: Capture) -> None:
    """It recomputes its experts as a whole, which megatron-core's combined schedule excludes."""
    gpu, flags = PUBLISHED["DeepSeek-V3, 256 H100"]
    flags = flags.replace("mla_up_proj mlp", "mla_up_proj moe mlp")
    printed = text(capsys, shlex.split(f"{COMMON} {flags}"), "--nodes", "32", "--gpu", gpu, "--quick")
    (reason,) = (line for line in printed.splitlines() if "are refused for one reason: " in line)
    assert "recompute_modules to be without moe" in reason
    assert re.search(r"Without it, .* with pairs, [\d,.]+ ms: \d+ GiB on the fullest rank, of which 72 GiB", reason)


def test_what_the_job_cannot_run_is_not_the_shortest(capsys: Capture) -> None:
    """With full recomputation, pairs are named only with their remedy and what they gain with it."""
    flags, own = [*EXPERTS, *FULL], (*APART, "--quick")
    printed = text(capsys, flags, *own)
    (line,) = (line for line in printed.splitlines() if line.startswith("all-to-all of experts: "))
    assert "with pairs" not in line
    (reason,) = (line for line in printed.splitlines() if "are refused for one reason: " in line)
    assert "need recompute_granularity to be selective" in reason and "gains anything" not in printed
    found = advice(capsys, flags, *own)
    row = found["with_remedy"]
    assert f"Without it, {row['name']} would take {row['makespan_ms']:,.1f} ms ({-row['gain']:+.1%})" in reason
    (last,) = (line for line in printed.splitlines() if line.startswith("Add "))
    assert "--recompute-granularity selective" in last and f": {-row['gain']:+.1%} of the time of the passes" in last
    assert row["name"].endswith("with pairs") and "selective" in row["flags"]
    assert {"--recompute-method", "--recompute-num-layers"} <= set(row["leave_out"])
    check_rows(capsys, {"advice": [row]}, flags, *own[:-1])
    remedied = changed(flags, ["--recompute-granularity", "selective"], FULL)
    assert row["makespan_ms"] <= min(each["makespan_ms"] for each in advice(capsys, remedied, *own)["advice"]) + 1e-6


def test_what_refuses_every_schedule_is_looked_behind(capsys: Capture) -> None:
    """Also where another option refuses them next."""
    flags = [*SMALL, "--cuda-graph-impl", "full_iteration", "--use-megatron-fsdp"]
    found = advice(capsys, flags, "--gpus-per-node", "4", "--quick")
    free = advice(capsys, SMALL, "--gpus-per-node", "4", "--quick")
    row, best = found["with_remedy"], free["advice"][free["best"] - 1]
    assert free["with_remedy"] is None and (row["name"], row["gain"]) == (best["name"], best["gain"])
    assert set(row["leave_out"]) == {"--cuda-graph-impl", "--use-megatron-fsdp"}
    printed = text(capsys, flags, "--gpus-per-node", "4", "--quick")
    assert f"Without it, {row['name']} would take " in printed


def test_shorter_plans_without_memory_are_named(capsys: Capture) -> None:
    """The advice is to stay only as the job is."""
    limit = ("--memory-limit", "0.9p", "--quick")
    found = advice(capsys, EXPERTS, *APART, *limit)
    (barred,) = found["barred"]
    assert barred["name"].endswith("with pairs") and barred["ms"] < 0.9 * found["job"]["makespan_ms"]
    printed = text(capsys, EXPERTS, *APART, *limit)
    said = f"Shorter, but not for this job as it is: {barred['name']}, {barred['ms']:,.1f} ms: activations of "
    assert said in printed and ("tay with" not in printed or "As the job is, stay with" in printed)


def test_the_environment_of_this_machine_does_not_matter(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for queues in ("1", "32", None):
        set_queues(monkeypatch, queues)
        found.append(advice(capsys, EXPERTS, *APART, "--quick", "--memory-limit", "1.3p"))
    assert found[0] == found[1] == found[2]
    assert any(row["environment"] for row in found[0]["advice"])
