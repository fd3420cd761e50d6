"""Sharded units in jobs of Megatron-LM: chunks stay shards between iterations, and what reads weights finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, pretrain_gpt, stock
from tests.megatron_lm.test_parity import CASES, CHECKOUTS, Row, job_of, same

pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
MORE = "--num-virtual-stages-per-pipeline-rank 2"
UNITS = ("--zero-bubble-shard-weights", "--zero-bubble-unit-microbatches", "64")
FOUR = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 4"
UNTIED = "--untie-embeddings-and-output-weights"


def check_bytes(own: Log, num_chunks: int) -> None:
    """At most two chunks with weights and two with gradients at a time, and nothing whole between iterations."""
    lines = own.of("sharded units: {")
    assert len(lines) == len(own.exit_codes)
    for line in lines:
        found = json.loads(line.partition(": ")[2])
        weights, gradients = (sorted(sizes) for sizes in zip(*found["sizes"], strict=True))
        assert len(weights) == num_chunks
        assert found["kept"] == 0
        assert 0 < found["whole"] <= sum(weights[-2:]) + sum(gradients[-2:])


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize(
    "options",
    [
        "--log-params-norm --log-num-zeros-in-grad --eval-interval 4",
        f"--bf16 --check-weight-hash-across-dp-replicas-interval 2 {UNTIED}",
        f"--fp16 --initial-loss-scale 16777216 --hysteresis 1 {UNTIED}",
    ],
)
def test_logs_equal_stock(checkout: Checkout, pipeline: int, options: str) -> None:
    """One unit of all microbatches, with an evaluation at the end; all that reads weights between iterations."""
    row = Row(f"--use-distributed-optimizer {options}", ranks_per_stage=2, samples=2)
    job = job_of(checkout, pipeline, row, MORE)
    own = pretrain_gpt(*job, "zero-pp", UNITS)
    same(own, stock(*job))
    check_bytes(own, 2)
    assert ("--fp16" in options) == any("number of skipped iterations:   1" in line for line in own.figures)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_only_some_chunks_are_whole(checkout: Checkout) -> None:
    """Two chunks of four per rank, optimizer steps and evaluations included; no chunk is much larger than others."""
    options = f"--use-distributed-optimizer --bf16 --eval-interval 4 --vocab-size 100 {UNTIED}"
    row = Row(options, ranks_per_stage=2, samples=2)
    job = job_of(checkout, 2, row, FOUR)
    own = pretrain_gpt(*job, "zero-pp", UNITS)
    same(own, stock(*job))
    check_bytes(own, 4)


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("options", ["", "--bf16 --swiglu"])
def test_checkpoints_continue_both_ways(checkout: Checkout, form: str, options: str, tmp_path: Path) -> None:
    """Jobs with sharded units continue stock's checkpoint as stock does, and stock continues theirs.

    Without the state of the optimizer: Megatron-LM cannot load that of torch's Adam, the only one on CPUs.
    """
    flags = f"{MORE} --ckpt-format {form} --no-save-optim --no-load-optim"
    job = job_of(checkout, 2, Row(f"--use-distributed-optimizer {options}", ranks_per_stage=2, samples=2), flags)
    until, folders = ("--save-interval", "4", "--exit-interval", "4"), [tmp_path / "stock", tmp_path / "own"]
    for folder, schedule in zip(folders, (None, "zero-pp"), strict=True):
        saved = pretrain_gpt(*job, schedule, (*(UNITS if schedule else ()), "--save", str(folder), *until))
        assert "exiting program at iteration 4" in saved.text, saved.text[-4000:]
        if schedule:
            whole = f"weights stay whole between iterations: --ckpt-format {form}" in saved.text
            assert whole == (form != "torch_dist")
            if not whole:
                check_bytes(saved, 2)
    expected = stock(*job, ("--load", str(folders[0])))
    same(pretrain_gpt(*job, "zero-pp", (*UNITS, "--load", str(folders[0]))), expected)
    again = stock(*job, ("--load", str(folders[1])))
    assert (again.figures, again.weights) == (expected.figures, expected.weights)


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES[:1])
def test_overlap_is_refused(checkout: Checkout, pipeline: int) -> None:
    row = Row("--use-distributed-optimizer --overlap-grad-reduce", ranks_per_stage=2, samples=2)
    own = pretrain_gpt(*job_of(checkout, pipeline, row, MORE), "zero-pp", ("--zero-bubble-shard-weights",))
    assert 0 not in own.exit_codes
    assert "sharded units need overlap_grad_reduce=False" in own.text
