"""``pretrain_gpt.py`` with vocabulary parallelism: its log equals that of the stock run up to rounding."""

from __future__ import annotations

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt, stock
from tests.megatron_lm.test_parity import COMBINED, PLAIN, Row, job_of, near

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
ROWS = {
    "plain": PLAIN,
    "learned positions, tied": Row("--position-embedding-type learned_absolute"),
    **{name: COMBINED[name] for name in ("dense", "half", "data", "tensor")},
}
SCHEDULES = (("zb-h1", "2"), ("1f1b", "1"))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(("schedule", "algorithm"), SCHEDULES)
@pytest.mark.parametrize("name", ROWS)
def test_logs_are_near_stock(checkout: Checkout, name: str, schedule: str, algorithm: str) -> None:
    row = ROWS[name]
    job = job_of(checkout, 2, row)
    own = pretrain_gpt(*job, schedule, ("--zero-bubble-vocabulary-parallel", algorithm))
    near(own, stock(*job), row.rounding)
    assert own.weights != stock(*job).weights, "shards add in another order, so equal weights mean that none ran"


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_logs_on_a_v_are_near_those_with_whole_layers(checkout: Checkout) -> None:
    """Stages of a V draw other initial weights than stock, so the same schedule with whole layers is the reference."""
    job = job_of(checkout, 2, PLAIN)
    near(
        pretrain_gpt(*job, "zb-v", ("--zero-bubble-vocabulary-parallel", "2")),
        pretrain_gpt(*job, "zb-v"),
        PLAIN.rounding,
    )


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(("flags", "message"), [("--mtp-num-layers 1", "mtp_num_layers")])
def test_what_it_does_not_support_is_refused(checkout: Checkout, flags: str, message: str) -> None:
    own = pretrain_gpt(*job_of(checkout, 2, PLAIN, flags), "zb-h1", ("--zero-bubble-vocabulary-parallel", "2"))
    assert all(own.exit_codes)
    assert message in own.text, own.text[-3000:]
    assert "Traceback" not in own.text
