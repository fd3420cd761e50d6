"""A dry run of a job of our training loop ends with the sentence with which the run ends, for every rule."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron.zero_bubble import __main__
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.exclusions import BALANCE, OPTIONS, SHARDS
from megatron.zero_bubble.planning.job.arguments.parser import build_parser, parse
from megatron.zero_bubble.planning.job.options import flag_of
from pretrain import run
from tests.helpers.refusals import H1, MEGATRONS_VALUES, jobs_of_effects, jobs_of_exclusions

SHAPES = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 10 "
    "--lr 1e-3 --mock-data --pipeline-model-parallel-size 2 --global-batch-size 8 --distributed-backend gloo"
)
NUM_RANKS = 4
SUBJECTS = {
    SHARDS: "--zero-bubble-schedule zero-pp --zero-bubble-shard-weights --use-distributed-optimizer",
    BALANCE: f"{H1} --zero-bubble-balance-microbatches --calculate-per-token-loss",
}
EXPERTS = f"{H1} --num-experts 4"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"
SELECTIVE = f"{H1} --recompute-granularity selective"
PAIRED = "--zero-bubble-schedule dualpipe-v --zero-bubble-overlap-experts --num-experts 4 --bf16"
OF_MEGATRON = (
    f"{EXPERTS} --transformer-impl local",
    f"{EXPERTS} --zero-bubble-device cpu",
    f"{H1} --moe-ffn-hidden-size 8",
    f"{EXPERTS} --disable-bias-linear --moe-shared-expert-intermediate-size 0",
    f"{EXPERTS} --transformer-impl transformer_engine {TENSOR}",
    f"{H1} --recompute-granularity full",
    f"{H1} --recompute-granularity full --recompute-method uniform",
    f"{SELECTIVE} --recompute-num-layers 1",
    f"{H1} --recompute-activations --recompute-num-layers 1",
    f"{SELECTIVE} --recompute-modules mla_up_proj",
    f"{SELECTIVE} --recompute-modules attention",
    f"{H1} --decoder-first-pipeline-num-layers 5 --account-for-loss-in-pipeline-split",
    f"{H1} --pipeline-model-parallel-layout Et*4|t*4L --account-for-loss-in-pipeline-split",
)
"""Jobs that megatron-core refuses when it makes its configuration, or that end in an error of autograd."""
OTHERS = (
    *OF_MEGATRON,
    f"{H1} --zero-bubble-exat",
    f"{H1} --zero-bubble-post-receives never",
    f"{H1} --zero-bubble-device cpu --distributed-backend nccl",
    f"{H1} --optimizer sgd --zero-bubble-post-validation --zero-bubble-rollback inverse",
    f"{H1} --zero-bubble-trace x --zero-bubble-trace-iterations 50-60 --train-iters 2",
    "--zero-bubble-schedule zb-9",
    f"{H1} --pipeline-model-parallel-size 1",
    "--zero-bubble-schedule interleaved-1f1b --no-overlap-p2p-communication",
    "--zero-bubble-schedule interleaved-1f1b --num-layers 6 --decoder-last-pipeline-num-layers 3",
    "--zero-bubble-schedule seq-zb-h1 --zero-bubble-slice-ends 8,31",
    f"{H1} --zero-bubble-record-costs x --zero-bubble-schedule 1f1b",
    f"{H1} --zero-bubble-record-costs x --zero-bubble-costs x",
    f"{PAIRED} --disable-bias-linear --expert-model-parallel-size 2",
    f"{PAIRED} --disable-bias-linear --moe-token-dispatcher-type alltoall",
    f"{PAIRED.replace('dualpipe-v', 'zb-h1')} --disable-bias-linear --expert-model-parallel-size 2",
    f"{H1} --save setup.py",
)


def of_tables() -> list[str]:
    """One job per rule of the tables that a job of our loop can break."""
    rows = [words for _, words in jobs_of_exclusions(False)]
    for rule, words in jobs_of_effects(False):
        on_one = "stock Megatron can be observed" in rule.why
        rows.append(f"{words} --pipeline-model-parallel-size 1" if on_one else words)
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    for rule in OPTIONS:
        if (job := SUBJECTS.get(rule.choice)) is not None and (flag := flag_of(rule.option)) in known:
            given = f"{job} {flag} {MEGATRONS_VALUES.get(rule.option, '')}"
            rows.append(job.replace(flag, "") if rule.value is True else given)
    return list(dict.fromkeys(words.strip() for words in rows))


ALL = [*of_tables(), *OTHERS]


def start(*_: object) -> int:
    raise AssertionError("the run began")


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, of which this process is the first, and no training."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(NUM_RANKS))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(NUM_RANKS))
    monkeypatch.setattr(run, "_run", start)


@pytest.mark.parametrize("job", ALL)
def test_dry_run_ends_like_the_run(capsys: pytest.CaptureFixture[str], job: str) -> None:
    flags = [*SHAPES.split(), *job.split()]
    assert run.main(flags) == 2
    of_run = capsys.readouterr().err.removeprefix("error: ")
    assert __main__.main(["dry-run", "--gpus-per-node", str(NUM_RANKS), "--", *flags]) == 2
    assert capsys.readouterr().err == f"zero-bubble dry-run: {of_run}"


def configuration(args: argparse.Namespace) -> Any:
    import torch

    from megatron.zero_bubble.planning.job.arguments.checks import check_layout
    from pretrain import model

    check_layout(args, NUM_RANKS)
    return model.build_config(args, torch.device("cpu"))


@pytest.mark.parametrize("job", OF_MEGATRON)
def test_what_is_refused_for_megatron_does_not_work_there(job: str) -> None:
    with pytest.raises(UserError, match="megatron-core"):
        configuration(parse([*SHAPES.split(), *job.split()]))
