"""Jobs of ``pretrain_gpt.py`` that compute layers again in a pass of its own have the logs of those that do it in B."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, pretrain_gpt, stock
from tests.helpers.rows import some
from tests.integration.megatron_lm.test_parity import CHECKOUTS, UNTIED, Row, job_of, same, switched
from tests.integration.megatron_lm.test_placements import on_a_v_after

pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]

METHODS = {
    "uniform": "--recompute-method uniform --recompute-num-layers 1",
    "two layers per checkpoint": "--recompute-method uniform --recompute-num-layers 2",
    "block": "--recompute-method block --recompute-num-layers 1",
}
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
EARLY = ("--zero-bubble-recompute", "early")


def recomputing(name: str, more: str = "") -> str:
    return f"{UNTIED} --recompute-granularity full {METHODS[name]} {more}"


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(
    ("name", "schedule"),
    some(
        [(name, schedule) for name in METHODS for schedule in ("1f1b", "zb-h1")],
        ("uniform", "1f1b"),
        ("block", "zb-h1"),
    ),
)
def test_logs_equal_stock_with_dropout(checkout: Checkout, name: str, schedule: str) -> None:
    job = job_of(checkout, 2, Row(recomputing(name, DROPOUT)))
    same(pretrain_gpt(*job, schedule, EARLY), stock(*job))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", some(METHODS, "uniform"))
def test_logs_equal_stock_while_zb_auto_switches(checkout: Checkout, name: str) -> None:
    job = job_of(checkout, 2, Row(recomputing(name, DROPOUT)), "--train-iters 60")
    own = pretrain_gpt(*job, "zb-auto", EARLY)
    same(own, stock(*job))
    switched(own)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", some(METHODS, "uniform"))
def test_logs_equal_stock_on_a_v(checkout: Checkout, name: str, tmp_path: Path) -> None:
    flags = f"--pipeline-model-parallel-size 2 --num-layers 8 {recomputing(name)}"
    own, expected = on_a_v_after(checkout, 2, flags, tmp_path, more=EARLY)
    same(own, expected)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", some(METHODS, "uniform"))
def test_dropout_on_a_v_is_that_of_backwards_which_recompute(checkout: Checkout, name: str) -> None:
    """Stock has another order of forwards, in which the stages of a rank draw other masks."""
    job = checkout, 2, f"--pipeline-model-parallel-size 2 --num-layers 8 {recomputing(name, DROPOUT)}"
    same(pretrain_gpt(*job, "zb-v", EARLY), pretrain_gpt(*job, "zb-v"))
