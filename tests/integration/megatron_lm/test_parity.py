"""Parity of ``pretrain_gpt.py`` with its stock run, under every schedule.

With ``--zero-bubble-exact``, printed losses and gradient norms and the final weights are equal bit for bit; without it,
losses and norms are equal up to rounding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, pretrain_gpt, stock

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]


class Row(NamedTuple):
    """One combination of features.

    Attributes:
        flags: flags in addition to those of the pipeline; ``{layout}`` is replaced by an uneven layout.
        ranks_per_stage: number of ranks per stage.
        samples: samples per microbatch, over all data-parallel ranks.
        moves: whether the features support placements other than Megatron's.
        rounding: relative tolerance of losses and norms against stock after ten iterations without
            ``--zero-bubble-exact``.
    """

    flags: str
    ranks_per_stage: int = 1
    samples: int = 1
    moves: bool = True
    rounding: float = 1e-5


UNTIED = "--untie-embeddings-and-output-weights"
_RAMPUP = "--rampup-batch-size 2 2 12 --train-samples 60 --lr-decay-samples 50"
_MOE = f"{UNTIED} --num-experts 4 --swiglu --disable-bias-linear"
_BF16, _FP16 = 2e-2, 5e-3
# Per number of stages: enough microbatches for every phase of a schedule.
NUM_MICROBATCHES = {2: 6, 4: 8}
_LAYOUTS = {2: "Et|t*3L", 4: "Et|t*2|t*3|t*2L"}
PLAIN = Row(UNTIED)
# Every variant that stock Megatron-LM can train on CPU ranks.
FEATURES = {
    "tied": Row(""),
    "distopt": Row(f"{UNTIED} --use-distributed-optimizer"),
    "bf16": Row(f"{UNTIED} --bf16"),
    "bf16-distopt": Row(f"{UNTIED} --bf16 --use-distributed-optimizer"),
    "fp16": Row(f"{UNTIED} --fp16 --initial-loss-scale 256"),
    "tp2-sp": Row(f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel", ranks_per_stage=2),
    "tp2": Row(f"{UNTIED} --tensor-model-parallel-size 2", ranks_per_stage=2),
    "dp2": Row(UNTIED, ranks_per_stage=2, samples=2),
    "dp2-overlap": Row(f"{UNTIED} --overlap-grad-reduce", ranks_per_stage=2, samples=2),
    "dp2-all-overlaps": Row(
        f"{UNTIED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ranks_per_stage=2,
        samples=2,
    ),
    "dp2-unaligned": Row(
        f"{UNTIED} --use-distributed-optimizer --overlap-grad-reduce --no-align-grad-reduce",
        ranks_per_stage=2,
        samples=2,
    ),
    "moe-allgather": Row(_MOE),
    "moe-alltoall": Row(
        f"{_MOE} --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2",
    ),
    "moe-shared": Row(f"{_MOE} --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"),
    "moe-expert-bias": Row(
        f"{_MOE} --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias",
    ),
    "moe-ep2": Row(
        f"{_MOE} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2", ranks_per_stage=2, samples=2
    ),
    "mtp": Row(f"{UNTIED} --mtp-num-layers 1"),
    "mtp-tied": Row("--mtp-num-layers 1", moves=False),  # stock cannot save these
    "mtp-tied-bf16": Row("--mtp-num-layers 1 --bf16", moves=False),
    "mtp-unaligned": Row(
        f"{UNTIED} --mtp-num-layers 1 --overlap-grad-reduce --no-align-grad-reduce",
        ranks_per_stage=2,
        samples=2,
    ),
    "per-token": Row(f"{UNTIED} --calculate-per-token-loss"),
    "recompute-full": Row(f"{UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-selective": Row(f"{UNTIED} --recompute-activations"),
    "llama": Row(
        f"{UNTIED} --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2",
    ),
    "ce-fusion": Row(f"{UNTIED} --cross-entropy-loss-fusion"),
    "logging": Row(
        f"{UNTIED} --log-num-zeros-in-grad --log-params-norm --timing-log-level 2 --log-throughput",
    ),
    "rampup": Row(f"{UNTIED} {_RAMPUP}"),
    "evaluation": Row(f"{UNTIED} --eval-interval 4 --eval-iters 2"),
    "signal-handler": Row(f"{UNTIED} --exit-signal-handler --manual-gc --manual-gc-interval 3"),
    "rerun": Row(f"{UNTIED} --rerun-mode validate_results"),
    "layout": Row(UNTIED + " --pipeline-model-parallel-layout {layout}", moves=False),
}
# The same features in few combinations, to run them with every version, schedule and number of stages.
COMBINED = {
    "dense": Row(
        "--micro-batch-size 2 --bf16 --use-distributed-optimizer --swiglu --normalization RMSNorm "
        "--disable-bias-linear --group-query-attention --num-query-groups 2 --recompute-activations "
        "--calculate-per-token-loss --cross-entropy-loss-fusion --log-num-zeros-in-grad --log-params-norm "
        "--timing-log-level 2 --log-throughput --eval-interval 4 --eval-iters 2 --exit-signal-handler --manual-gc "
        "--manual-gc-interval 3 --rerun-mode validate_results",
        samples=2,
        rounding=_BF16,
    ),
    "half": Row(
        f"{UNTIED} --fp16 --initial-loss-scale 256 --tensor-model-parallel-size 2 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 {_RAMPUP}",
        ranks_per_stage=2,
        rounding=_FP16,
    ),
    "data": Row(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-align-grad-reduce",
        ranks_per_stage=2,
        samples=2,
    ),
    "experts": Row(
        f"{_MOE} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--overlap-grad-reduce --bf16",
        ranks_per_stage=2,
        samples=2,
        rounding=_BF16,
    ),
    "tensor": Row(f"{_MOE} --tensor-model-parallel-size 2 --sequence-parallel", ranks_per_stage=2),
    "prediction": Row(f"{_MOE} --mtp-num-layers 1"),
    "prediction-tied": Row("--mtp-num-layers 1 --bf16", moves=False, rounding=_BF16),
    "prediction-data": FEATURES["mtp-unaligned"],
    "layout": FEATURES["layout"],
}
CASES = [
    pytest.param(checkout, pipeline, id=f"{checkout}-pp{pipeline}") for checkout in CHECKOUTS for pipeline in (2, 4)
]
IN_PLACE = ("zb-h1", "zb-h2")


_Job = tuple[Checkout, int, str]


def job_of(checkout: Checkout, pipeline: int, row: Row, more: str = "") -> _Job:
    """Return the arguments of the helpers for one row on ``pipeline`` stages."""
    stages = f"--pipeline-model-parallel-size {pipeline} --num-layers {2 * pipeline}"
    stages += f" --global-batch-size {NUM_MICROBATCHES[pipeline] * row.samples}"
    flags = row.flags.format(layout=_LAYOUTS[pipeline])
    return checkout, pipeline * row.ranks_per_stage, f"{stages} {flags} {more}"


def same(own: Log, expected: Log) -> None:
    assert own.exit_codes == expected.exit_codes, own.text[-4000:]
    assert own.figures == expected.figures
    assert len(own.figures) >= 6
    assert own.weights == expected.weights
    assert len(own.weights) > 10
    assert len(own.of("zero-bubble: schedule ")) == 1


_NUMBER = re.compile(r"(loss|loss value|grad norm): ([\d.E+-]+)")


def near(own: Log, expected: Log, rounding: float) -> None:
    """Compare losses and norms; norms are printed with three decimals, of which the last may be rounded differently."""
    assert own.exit_codes == expected.exit_codes, own.text[-4000:]
    numbers, wanted = (_NUMBER.findall("\n".join(log.figures)) for log in (own, expected))
    assert [name for name, _ in numbers] == [name for name, _ in wanted]
    assert len(numbers) >= 2 * 6
    for (name, number), (_, expected_number) in zip(numbers, wanted, strict=True):
        absolute = 1.001e-3 if name == "grad norm" else 1e-6
        assert float(number) == pytest.approx(float(expected_number), rel=rounding, abs=absolute)
    assert len(own.of("zero-bubble: schedule ")) == 1


def until(iteration: int, folder: Path) -> tuple[str, ...]:
    """Return flags of a job that saves after ``iteration`` and ends."""
    return ("--save", str(folder), "--save-interval", str(iteration), "--exit-interval", str(iteration))


def switched(own: Log) -> None:
    said = own.of("zero-bubble: zb-auto: ")
    assert any("switched to the planned schedule" in line for line in said), own.text[-4000:]


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("schedule", IN_PLACE)
def test_logs_equal_stock(checkout: Checkout, pipeline: int, schedule: str) -> None:
    job = job_of(checkout, pipeline, PLAIN)
    same(pretrain_gpt(*job, schedule), stock(*job))


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
def test_logs_equal_stock_interleaved(checkout: Checkout, pipeline: int) -> None:
    job = job_of(checkout, pipeline, PLAIN, "--num-virtual-stages-per-pipeline-rank 2")
    same(pretrain_gpt(*job, "interleaved-1f1b"), stock(*job))


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
def test_logs_equal_stock_while_zb_auto_switches(checkout: Checkout, pipeline: int) -> None:
    job = job_of(checkout, pipeline, PLAIN, "--train-iters 60")
    own = pretrain_gpt(*job, "zb-auto")
    same(own, stock(*job))
    switched(own)


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("schedule", [*IN_PLACE, "zb-auto"])
def test_logs_equal_stock_with_combined_features(checkout: Checkout, pipeline: int, name: str, schedule: str) -> None:
    """Ten iterations; ``zb-auto`` may or may not have switched schedules by then."""
    job = job_of(checkout, pipeline, COMBINED[name])
    same(pretrain_gpt(*job, schedule), stock(*job))


@pytest.mark.full
@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("schedule", [*IN_PLACE, "zb-auto"])
@pytest.mark.parametrize("name", FEATURES)
def test_logs_equal_stock_with_each_feature(checkout: Checkout, pipeline: int, name: str, schedule: str) -> None:
    job = job_of(checkout, pipeline, FEATURES[name])
    same(pretrain_gpt(*job, schedule), stock(*job))


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", ["plain", *COMBINED])
def test_logs_are_near_stock_by_default(checkout: Checkout, pipeline: int, name: str) -> None:
    row = COMBINED.get(name, PLAIN)
    job = job_of(checkout, pipeline, row)
    own = pretrain_gpt(*job, "zb-h1", exact=False)
    near(own, stock(*job), row.rounding)
    if row.rounding > PLAIN.rounding:
        assert own.weights != stock(*job).weights, "weight gradients must not be rounded to the weights' dtype"


# Per case, on three ranks: the layout, and the first minor of megatron-core that supports it.
_ODD_STAGES = {
    "prediction": ("--mtp-num-layers 1 --pipeline-model-parallel-layout Ett|ttm|L", 16),
    "no-parameters": ("--pipeline-model-parallel-layout Ett||ttL", 13),
}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", _ODD_STAGES)
@pytest.mark.parametrize("schedule", IN_PLACE)
def test_logs_equal_stock_with_unusual_stages(checkout: Checkout, name: str, schedule: str) -> None:
    """Multi-token prediction on a separate stage, and a stage without parameters."""
    flags, first = _ODD_STAGES[name]
    job = checkout, 3, f"--pipeline-model-parallel-size 3 {flags}"
    own = pretrain_gpt(*job, schedule)
    if int(checkout.minor.partition(".")[2]) >= first:
        same(own, stock(*job))
        return
    # Stock rejects the layout too, except 0.14, where its ranks deadlock.
    assert all(own.exit_codes)
    assert re.search("MTP|multi-token prediction before the last stage", own.text), own.text[-4000:]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_uneven_layers_equal_stock_with_the_same_layout(checkout: Checkout) -> None:
    """The output layer of this model takes longer than half of its layers; stock has to be given the layout."""
    flags = f"--pipeline-model-parallel-size 2 --num-layers 5 {UNTIED}"
    own = pretrain_gpt(checkout, 2, flags, "zb-h1")
    assert own.of("zero-bubble: layers by stage: ") == ["zero-bubble: layers by stage: Et*5|L"]
    same(own, stock(checkout, 2, f"{flags} --pipeline-model-parallel-layout Et*5|L"))


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("schedule", IN_PLACE)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_checkpoint_continues_in_stock(checkout: Checkout, schedule: str, form: str, tmp_path: Path) -> None:
    """Stock continues from our checkpoint as from its own.

    Since core_r0.16 a resumed stock run differs slightly from an uninterrupted one, so that both sides are resumed.
    """
    job = job_of(checkout, 2, PLAIN, f"--ckpt-format {form}")
    assert continued(job, schedule, 4, tmp_path) == continued(job, None, 4, tmp_path)


def continued(job: _Job, schedule: str | None, after: int, folder: Path, more: tuple[str, ...] = ()) -> list[str]:
    """Run a job with the schedule for ``after`` iterations, continue it in stock, and return the figures of both."""
    saved = pretrain_gpt(*job, schedule, (*more, *until(after, folder / str(schedule))))
    assert f"exiting program at iteration {after}" in saved.text, saved.text[-2000:]
    assert len(saved.of("zero-bubble: schedule ")) == (schedule is not None)
    own = pretrain_gpt(*job, None, ("--load", str(folder / str(schedule))))
    assert own.exit_codes == (0, 0), own.text[-4000:]
    assert re.match(rf"iteration +{after + 1}/", own.figures[0]), own.figures
    assert len(own.figures) >= 10 - after
    assert len(own.weights) > 10
    return [*saved.figures, *own.figures, *own.weights]
