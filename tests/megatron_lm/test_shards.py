"""Sharded units in jobs of Megatron-LM, whose own loop sees whole weights between iterations."""

from __future__ import annotations

import pytest

from tests.helpers.megatron_lm import Checkout, pretrain_gpt, stock
from tests.megatron_lm.test_parity import CASES, Row, job_of, same

MORE = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("options", ["", "--bf16 --untie-embeddings-and-output-weights"])
def test_logs_equal_stock(checkout: Checkout, pipeline: int, options: str) -> None:
    """One unit of all microbatches, with an evaluation at the end."""
    row = Row(f"--use-distributed-optimizer {options}", ranks_per_stage=2, samples=2)
    job = job_of(checkout, pipeline, row, MORE)
    units = ("--zero-bubble-shard-weights", "--zero-bubble-unit-microbatches", "64")
    same(pretrain_gpt(*job, "zero-pp", units), stock(*job))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES[:1])
def test_overlap_is_refused(checkout: Checkout, pipeline: int) -> None:
    row = Row("--use-distributed-optimizer --overlap-grad-reduce", ranks_per_stage=2, samples=2)
    own = pretrain_gpt(*job_of(checkout, pipeline, row, MORE), "zero-pp", ("--zero-bubble-shard-weights",))
    assert 0 not in own.exit_codes
    assert "sharded units need overlap_grad_reduce=False" in own.text
