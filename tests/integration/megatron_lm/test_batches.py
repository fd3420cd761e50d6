"""Tests of a job's batch sizes: a step schedule is read as Megatron reads it, and no size is assumed."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.megatron_lm.batches import in_training, job_batches, num_microbatches
from tests.helpers.megatron_lm import VARIABLE, checkouts

STEPS = "0:16 1M:64, 2M:128"


def job(**flags: Any) -> SimpleNamespace:
    sizes = {"micro_batch_size": 2, "data_parallel_size": 4, "global_batch_size": None, "eval_iters": 0}
    return SimpleNamespace(**{**sizes, **flags})


def test_steps_of_the_batch_size() -> None:
    assert in_training(job(step_batch_size_schedule=STEPS)) == [2, 8, 16]
    assert job_batches(job(step_batch_size_schedule="1.5K:32 0:8")).steps == (8, 32)
    assert num_microbatches(job(step_batch_size_schedule=STEPS, eval_iters=1)) == [2, 8, 16, 1]
    assert num_microbatches(job(step_batch_size_schedule=STEPS, eval_iters=1, eval_global_batch_size=24))[-1] == 3


def test_ramp_counts_only_where_megatron_has_one() -> None:
    ramp = job(global_batch_size=32, rampup_batch_size=["8", "8", "100"])
    assert in_training(ramp) == [1, 2, 3, 4] and in_training(ramp, has_ramps=False) == [4]


@pytest.mark.parametrize("text", ["", "16", "1:16", "0:16 0:32", "0:4", "0:x", "0:16 1M"])
def test_steps_that_cannot_be_read_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="--step-batch-size-schedule must have entries THRESHOLD:SIZE"):
        job_batches(job(step_batch_size_schedule=text))


def test_job_without_a_batch_size_is_rejected() -> None:
    with pytest.raises(
        UserError, match="a job needs --global-batch-size, or --step-batch-size-schedule .* got neither"
    ):
        in_training(job())


@pytest.mark.parametrize(
    ("size", "ramp", "refused", "counts"), [(20, None, 20, [2]), (24, ["8", "4", "100"], 12, [1, 1, 2, 2, 3])]
)
def test_batches_are_divided_into_microbatches(
    size: int, ramp: list[str] | None, refused: int, counts: list[int]
) -> None:
    own = job(global_batch_size=size, rampup_batch_size=ramp)
    with pytest.raises(UserError, match=rf"must be divisible by .* got {refused} and 2 \* 4; change .* multiples of 8"):
        in_training(own)
    own.decrease_batch_size_if_needed = True
    assert in_training(own) == counts


@pytest.mark.skipif(not checkouts(), reason=f"{VARIABLE} names no checkout of Megatron-LM")
def test_steps_are_those_of_megatron() -> None:
    spec = importlib.util.spec_from_file_location(
        "steps_of_megatron", checkouts()[-1].path / "megatron/core/num_microbatches_calculator.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "StepBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this version has no steps")
    for text in (STEPS, "0:8 2K:32"):
        steps = module.StepBatchsizeNumMicroBatchesCalculator(2, 4, False, 1, text, 32).schedule
        assert job_batches(job(step_batch_size_schedule=text)).steps == tuple(size for _, size in steps)
