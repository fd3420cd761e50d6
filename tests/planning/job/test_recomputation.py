"""What full recomputation costs, said at the start of a job."""

from __future__ import annotations

import argparse

import pytest

from megatron.zero_bubble.planning.job.arguments.checks import check
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.job.recomputation import remark

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--global-batch-size 32 --lr 1e-4 --train-iters 1 --mock-data --bf16 --pipeline-model-parallel-size 4 "
    "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def job(flags: str) -> argparse.Namespace:
    args = parse([*LLAMA.split(), *flags.split()])
    check(args, 8)
    return args


def said(flags: str) -> str | None:
    args = job(flags)
    return remark(args, args.source, 32)


def test_remark_names_both_amounts_and_the_remedies() -> None:
    sentence = said(f"{FULL} --zero-bubble-schedule zb-h1")
    assert sentence is not None
    assert sentence.startswith(
        "with --recompute-granularity full, zb-h1 keeps an estimated 17.1 GiB of activations in the layers of a rank, "
        "1F1B 1 GiB, because B"
    )
    assert "use --zero-bubble-schedule zb-auto" in sentence
    assert sentence.endswith("or --recompute-granularity selective")


@pytest.mark.parametrize(
    "flags",
    [
        FULL,
        "--zero-bubble-schedule zb-h1",
        "--recompute-granularity selective --zero-bubble-schedule zb-h1",
        f"{FULL} --zero-bubble-schedule 1f1b",
        f"{FULL} --zero-bubble-schedule zb-auto",
    ],
)
def test_nothing_is_said_where_nothing_is_lost(flags: str) -> None:
    assert said(flags) is None


@pytest.mark.parametrize(("count", "theirs"), [(8, "1F1B 1 GiB"), (2, "1F1B 13.8 GiB")])
def test_amounts_of_some_layers_of_every_stage(count: int, theirs: str) -> None:
    flags = f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"
    sentence = said(f"{flags} --zero-bubble-schedule zb-h1")
    assert sentence is not None and theirs in sentence


def test_flags_of_megatron_lm_are_read() -> None:
    """Validated, these lack --recompute-activations."""
    args = job(f"{FULL} --zero-bubble-schedule zb-v")
    del args.recompute_activations
    assert "GiB of activations in the layers of a rank, 1F1B 1 GiB" in (remark(args, args.source, 32) or "")
