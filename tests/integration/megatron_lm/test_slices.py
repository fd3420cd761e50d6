"""``pretrain_gpt.py`` with sequence slices: its log equals that of the stock run, without slices, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt, stock
from tests.integration.megatron_lm.test_models import LATENT, at_least
from tests.integration.megatron_lm.test_parity import COMBINED, PLAIN, Row, job_of, near

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
_UNTIED = "--untie-embeddings-and-output-weights"
CUTS = {
    "seq-zb-h1": ("--zero-bubble-num-slices", "4"),
    "seq-1f1b": ("--zero-bubble-slice-ends", "24,40,56,64"),
}
# The gradient of a slice is smaller than that of a whole sequence, so more of it is below the smallest number of fp16.
_HALF = COMBINED["half"]
ROWS = {
    "plain": PLAIN,
    "learned positions, tied": Row("--position-embedding-type learned_absolute"),
    "documents": Row(f"{_UNTIED} --reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "half": _HALF._replace(flags=_HALF.flags.replace("--initial-loss-scale 256", "--initial-loss-scale 16384")),
    **{name: COMBINED[name] for name in ("dense", "data", "tensor")},
    "predictions": Row(f"{_UNTIED} --mtp-num-layers 1"),
}
DEEPSEEK = Row(
    f"{LATENT} --swiglu --num-experts 4 --moe-layer-freq [0]+[1]*3 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 64 "
    "--mtp-num-layers 1",
)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("name", ROWS)
def test_logs_are_near_stock(checkout: Checkout, name: str, schedule: str) -> None:
    row = ROWS[name]
    job = job_of(checkout, 2, row)
    own = pretrain_gpt(*job, schedule, CUTS[schedule])
    near(own, stock(*job), row.rounding)
    assert own.weights != stock(*job).weights, "slices add in another order, so equal weights mean that none ran"


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
@pytest.mark.parametrize("schedule", CUTS)
def test_experts_with_latent_attention_and_prediction_are_near_stock(checkout: Checkout, schedule: str) -> None:
    job = job_of(checkout, 2, DEEPSEEK)
    near(pretrain_gpt(*job, schedule, CUTS[schedule]), stock(*job), DEEPSEEK.rounding)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_one_slice_equals_stock(checkout: Checkout) -> None:
    job = job_of(checkout, 2, PLAIN)
    own = pretrain_gpt(*job, "seq-zb-h1", ("--zero-bubble-num-slices", "1"))
    assert (own.figures, own.weights) == (stock(*job).figures, stock(*job).weights)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_checkpoint_continues_with_and_without_slices(checkout: Checkout, tmp_path: Path) -> None:
    job = job_of(checkout, 2, PLAIN, "--ckpt-format torch_dist")
    saved = pretrain_gpt(
        *job, "seq-zb-h1", (*CUTS["seq-zb-h1"], "--save", str(tmp_path), "--save-interval", "4", "--exit-interval", "4")
    )
    assert "exiting program at iteration 4" in saved.text, saved.text[-2000:]
    load = ("--load", str(tmp_path))
    near(pretrain_gpt(*job, "seq-1f1b", (*CUTS["seq-1f1b"], *load)), stock(*job, load), PLAIN.rounding)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq-length 64 --zero-bubble-slice-ends 24,40,56,72", "must be the length of the sequences"),
        ("--zero-bubble-num-slices 65", "at most 64 slices"),
    ],
)
def test_what_slices_do_not_support_is_refused(checkout: Checkout, flags: str, message: str) -> None:
    own = pretrain_gpt(*job_of(checkout, 2, PLAIN, flags), "seq-zb-h1")
    assert all(own.exit_codes)
    assert message in own.text, own.text[-3000:]
    assert "Traceback" not in own.text
