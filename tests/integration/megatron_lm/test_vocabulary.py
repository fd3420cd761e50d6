"""``pretrain_gpt.py`` with vocabulary parallelism: its log equals that of the stock run up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.formats.trace import read_trace_file
from megatron.zero_bubble.core.ir.vocabulary import algorithm_of
from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt, stock
from tests.integration.megatron_lm.test_parity import COMBINED, PLAIN, Row, job_of, near, until
from tests.integration.megatron_lm.test_slices import DEEPSEEK, at_least

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


@pytest.mark.parametrize(
    ("checkout", "row"), [*((each, PLAIN) for each in CHECKOUTS), *((each, DEEPSEEK) for each in at_least(16))]
)
def test_logs_on_a_v_are_near_those_with_whole_layers(checkout: Checkout, row: Row) -> None:
    """Stages of a V draw other initial weights than stock, so the same schedule with whole layers is the reference."""
    job = job_of(checkout, 2, row)
    near(
        pretrain_gpt(*job, "zb-v", ("--zero-bubble-vocabulary-parallel", "2")),
        pretrain_gpt(*job, "zb-v"),
        row.rounding,
    )


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
@pytest.mark.parametrize(("schedule", "algorithm"), SCHEDULES)
def test_experts_with_latent_attention_and_prediction_are_near_stock(
    checkout: Checkout, schedule: str, algorithm: str
) -> None:
    """The log has the losses of the prediction."""
    job = job_of(checkout, 2, DEEPSEEK)
    own = pretrain_gpt(*job, schedule, ("--zero-bubble-vocabulary-parallel", algorithm))
    near(own, stock(*job), DEEPSEEK.rounding)
    assert all("mtp_1 loss" in figures for figures in own.figures if figures.startswith("iteration"))
    assert own.weights != stock(*job).weights


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
def test_checkpoint_of_predictions_continues_with_whole_layers(checkout: Checkout, tmp_path: Path) -> None:
    """And one of whole layers with a divided vocabulary, whose embedding has no copy."""
    job = job_of(checkout, 2, DEEPSEEK, "--ckpt-format torch_dist")
    divided, folders = ("--zero-bubble-vocabulary-parallel", "2"), [tmp_path / "divided", tmp_path / "whole"]
    saved = pretrain_gpt(*job, "zb-h1", (*divided, *until(4, folders[0]))), stock(*job, until(4, folders[1]))
    assert all("exiting program at iteration 4" in log.text for log in saved), saved[0].text[-2000:]
    for folder in folders:
        load = ("--load", str(folder))
        near(pretrain_gpt(*job, "zb-h1", (*divided, *load)), stock(*job, load), DEEPSEEK.rounding)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(
    ("flags", "message"),
    [("--mtp-num-layers 1 --context-parallel-size 2", "context_parallel_size to be 1 with mtp_num_layers")],
)
def test_what_it_does_not_support_is_refused(checkout: Checkout, flags: str, message: str) -> None:
    own = pretrain_gpt(*job_of(checkout, 2, PLAIN, flags), "zb-h1", ("--zero-bubble-vocabulary-parallel", "2"))
    assert all(own.exit_codes)
    assert message in own.text, own.text[-3000:]
    assert "Traceback" not in own.text


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_recorded_costs_make_a_plan_that_runs(
    checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured with recomputed logits; the file of the plan says that the vocabulary is divided."""
    job, costs, plan = job_of(checkout, 2, PLAIN), str(tmp_path / "costs.json"), tmp_path / "plan.json"
    recorded = pretrain_gpt(
        *job,
        "zb-h1",
        (
            *("--zero-bubble-vocabulary-parallel", "2", "--zero-bubble-recompute", "logits"),
            *("--zero-bubble-trace", str(tmp_path), "--zero-bubble-record-costs", costs, "--zero-bubble-log-bubble"),
        ),
    )
    near(recorded, stock(*job), PLAIN.rounding)
    assert len(recorded.of("zero-bubble: iteration ")) == 10
    recording = read_trace_file(tmp_path / "trace.json")
    assert {algorithm_of(trace.timeline.schedule) for trace in recording.traces.values()} == {2}
    assert recording.memory is not None and len(recording.memory.logits) == 2
    sizes = ["--num-ranks", "2", "--num-microbatches", "6", "--placement", "linear", "--memory-limit", "2p"]
    options = ["--costs", costs, "--vocabulary", "auto", "--format", "json"]
    assert main(["plan", "--schedule", "zb-auto", *sizes, *options]) == 0
    plan.write_text(capsys.readouterr().out)
    planned = pretrain_gpt(*job[:2], f"{job[2]} --zero-bubble-schedule-file {plan} --zero-bubble-exact", None)
    near(planned, stock(*job), PLAIN.rounding)
    assert planned.weights != stock(*job).weights


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_search_measures_a_divided_vocabulary(checkout: Checkout) -> None:
    job = job_of(checkout, 2, PLAIN)
    own = pretrain_gpt(*job, "zb-auto", ("--zero-bubble-vocabulary-parallel", "2"))
    near(own, stock(*job), PLAIN.rounding)
    assert "zb-auto: iteration 6, zb-h1 (vocabulary 2): predicted" in own.text, own.text[-3000:]


@pytest.mark.parametrize("checkout", at_least(16), ids=str)
def test_search_measures_predictions(checkout: Checkout) -> None:
    """With recomputed logits, because other options are above."""
    job = job_of(checkout, 2, DEEPSEEK)
    own = pretrain_gpt(*job, "zb-auto", ("--zero-bubble-vocabulary-parallel", "1", "--zero-bubble-recompute", "logits"))
    near(own, stock(*job), DEEPSEEK.rounding)
    assert "zb-auto: iteration 6, zb-h1 (vocabulary 1): predicted" in own.text, own.text[-3000:]
