"""Post-validation in ``pretrain_gpt.py``: lines, weights and optimizer states equal those of stock, bit for bit.

Stock is the synchronous job without a zero-bubble schedule. Gradients are spoiled on one stage in chosen iterations of
both jobs, so that steps are skipped or clipped; rollbacks, late lines and settled steps must not show.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, Log, checkouts, gpt_job, pretrain_gpt, running, stock

CHECKOUTS = checkouts()
NEWEST = CHECKOUTS[-1:]
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]

_UNTIED = "--untie-embeddings-and-output-weights"
_LOOSE = "--clip-grad 100"
"""A threshold that no norm of these models reaches unless its gradients are spoiled."""
_FP16 = f"--fp16 --initial-loss-scale 256 --loss-scale-window 4 --hysteresis 1 {_LOOSE}"
_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_MOE = (
    "--num-experts 4 --swiglu --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
_NUMBER_OF = re.compile(r"(\d+) (ahead|repeated|synchronous|skipped|waited)")


class Row(NamedTuple):
    """A job, and its faults per number of stages.

    Attributes:
        flags: flags in addition to those of the pipeline.
        spoiled: faults ITERATION:STAGE:FACTOR; a stage of -1 is the last one.
        expected: how steps must have been taken on the first rank.
    """

    flags: str
    spoiled: str
    expected: frozenset[str] = frozenset({"ahead", "repeated"})
    ranks_per_stage: int = 1
    samples: int = 1


_SPIKES = "4:-1:1e6,12:0:1e6,13:-1:1e6,15:-1:1e6"
_OVERFLOWS = "1:-1:nan,4:0:inf,7:-1:nan,8:-1:inf,11:1:nan,13:2:nan,15:-1:inf,16:0:nan"
ROWS = {
    "fp32, tied, clip": Row(_LOOSE, _SPIKES),
    "fp16, overflows, evaluation": Row(f"{_UNTIED} {_FP16} --eval-interval 4 --eval-iters 2", _OVERFLOWS),
    "bf16, constant scale, zeros": Row(
        f"{_UNTIED} {_LOOSE} --bf16 --loss-scale 128 --log-num-zeros-in-grad", _OVERFLOWS
    ),
    "dropout, parameter norm": Row(
        f"{_UNTIED} {_LOOSE} --hidden-dropout 0.1 --attention-dropout 0.1 --log-params-norm", _SPIKES
    ),
    "distributed optimizer, overlaps": Row(
        f"{_UNTIED} {_OVERLAPS} {_FP16} --timing-log-level 1", _OVERFLOWS, ranks_per_stage=2, samples=2
    ),
    "experts": Row(f"{_UNTIED} {_LOOSE} {_MOE} --log-interval 2", _SPIKES),
    "prediction": Row(f"{_UNTIED} {_LOOSE} --mtp-num-layers 1", _SPIKES),
    "fp16, prediction": Row(f"{_UNTIED} {_FP16} --mtp-num-layers 1", _OVERFLOWS),
    "ramp-up, reruns": Row(
        f"{_UNTIED} {_LOOSE} --rampup-batch-size 2 2 36 --train-samples 96 --lr-decay-samples 90 "
        "--rerun-mode validate_results",
        "4:-1:1e6,8:0:1e6",
    ),
}  # fmt: skip
CASES = [
    pytest.param(checkout, pipeline, id=f"{checkout}-pp{pipeline}") for checkout in CHECKOUTS for pipeline in (2, 4)
]


def _flags(row: Row, pipeline: int, more: str = "") -> str:
    stages = f"--pipeline-model-parallel-size {pipeline} --num-layers {2 * pipeline}"
    length = "" if "--train-samples" in row.flags else "--train-iters 16"
    return f"{stages} {length} --global-batch-size {(pipeline + 4) * row.samples} {row.flags} {more}"


def _spoiled(row: Row, pipeline: int) -> str:
    return row.spoiled.replace(":-1:", f":{pipeline - 1}:")


def _counts(own: Log) -> Counter[str]:
    (line,) = own.of("zero-bubble: post-validation: ")
    return Counter({how: int(count) for count, how in _NUMBER_OF.findall(line.partition(";")[0])})


def _same(own: Log, expected: Log) -> None:
    assert own.exit_codes == expected.exit_codes, own.text[-4000:]
    assert own.figures == expected.figures
    assert own.weights == expected.weights
    assert len(own.weights) > 20


def _ahead(checkout: Checkout, ranks: int, flags: str, schedule: str, spoiled: str, more: tuple[str, ...] = ()) -> Log:
    return pretrain_gpt(checkout, ranks, flags, schedule, ("--zero-bubble-post-validation", *more), spoiled=spoiled)


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", ROWS)
def test_job_equals_synchronous_stock(checkout: Checkout, pipeline: int, name: str) -> None:
    row = ROWS[name]
    flags, spoiled, ranks = _flags(row, pipeline), _spoiled(row, pipeline), pipeline * row.ranks_per_stage
    own = _ahead(checkout, ranks, flags, "zb-h2", spoiled)
    _same(own, stock(checkout, ranks, flags, (), spoiled))
    assert row.expected <= _counts(own).keys(), own.of("zero-bubble: ")


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
@pytest.mark.parametrize("name", ["fp16, overflows, evaluation", "experts", "fp16, prediction"])
def test_job_on_a_v_equals_synchronous_stock(checkout: Checkout, pipeline: int, name: str, tmp_path: Path) -> None:
    """With another placement a seed yields other initial weights, so both jobs continue from a stock checkpoint, and no
    step is clipped, because the norm is summed in another order.
    """
    row = ROWS[name]
    flags = _flags(row, pipeline, "--ckpt-format torch_dist")
    begun = stock(checkout, pipeline, flags, ("--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"))
    assert "exiting program at iteration 2" in begun.text
    load = ("--load", str(tmp_path))
    spoiled = "4:0:nan,7:1:nan,8:1:inf" if "fp16" in name else ""
    own = _ahead(checkout, pipeline, flags, "zb-v", spoiled, load)
    _same(own, stock(checkout, pipeline, flags, load, spoiled))
    assert {"ahead", *(["repeated"] if spoiled else [])} <= _counts(own).keys()


@pytest.mark.parametrize(("checkout", "pipeline"), CASES)
def test_job_equals_stock_while_zb_auto_switches(checkout: Checkout, pipeline: int) -> None:
    row = ROWS["fp16, overflows, evaluation"]
    flags, spoiled = f"{_flags(row, pipeline)} --train-iters 60 --zero-bubble-memory-limit 2p", _spoiled(row, pipeline)
    plain = flags.replace("--zero-bubble-memory-limit 2p", "")
    own = _ahead(
        checkout, pipeline, plain, "zb-auto", f"{spoiled},40:0:nan,50:1:inf", ("--zero-bubble-memory-limit", "2p")
    )
    _same(own, stock(checkout, pipeline, plain, (), f"{spoiled},40:0:nan,50:1:inf"))
    assert any("switched to the planned schedule" in line for line in own.of("zero-bubble: zb-auto: "))


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
def test_steps_are_clipped_by_a_norm_that_is_a_tensor(checkout: Checkout) -> None:
    """Since core_r0.17, with TransformerEngine; a quotient of tensors is rounded differently from one of numbers."""
    row = ROWS["fp32, tied, clip"]
    logs = []
    for schedule, more in ((None, ()), ("zb-h2", ("--zero-bubble-post-validation",))):
        job = gpt_job(checkout, 2, _flags(row, 2), schedule, more)
        with running(replace(job, spoiled=_spoiled(row, 2), norm_as_tensor=True), checkout) as started:
            codes = started.wait(300)
        logs.append(Log(started.text, codes))
    _same(logs[1], logs[0])
    assert _counts(logs[1]).keys() >= row.expected


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars that a job wrote to TensorBoard, without times and memory, in the order in which it wrote them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    newest = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)  # a job that aborted at exit ran twice
    for event in LegacyEventFileLoader(str(newest)).Load():
        for value in event.summary.value:
            if value.HasField("simple_value") and not re.search("time|mem|throughput", value.tag):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def _logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What a job logged to Weights & Biases, without times and memory, in order."""
    lines = (folder / "logged.jsonl").read_text().splitlines()
    figures = [(step, name, value) for step, of in map(json.loads, lines) for name, value in of.items()]
    return [(step, {name: value}) for step, name, value in figures if not re.search("time|mem|throughput", name)]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_scalars_of_writers_equal_stock(checkout: Checkout, tmp_path: Path) -> None:
    """TensorBoard and Weights & Biases get scalars in every iteration, the log a line in every third."""
    pytest.importorskip("tensorboard")
    row = Row(f"{_UNTIED} {_FP16} --log-num-zeros-in-grad --log-interval 3", _OVERFLOWS)
    flags, spoiled = _flags(row, 2), _spoiled(row, 2)
    own, theirs = tmp_path / "own", tmp_path / "stock"
    wandb = ("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir")
    job = _ahead(checkout, 2, flags, "zb-h2", spoiled, ("--tensorboard-dir", str(own), *wandb, str(tmp_path / "w")))
    _same(job, stock(checkout, 2, flags, ("--tensorboard-dir", str(theirs), *wandb, str(tmp_path / "v")), spoiled))
    found, expected = _scalars(own), _scalars(theirs)
    assert found == expected
    assert _logged(tmp_path / "w") == _logged(tmp_path / "v")
    steps = [step for step, _ in _logged(tmp_path / "w")]
    assert len(steps) > 60 and steps == sorted(steps)
    assert len(found["grad-norm"]) == 9 and len(found["loss-scale"]) == 16
    assert _counts(job)["repeated"] >= 3


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_checkpoint_after_a_rejected_step_continues_in_stock(checkout: Checkout, form: str, tmp_path: Path) -> None:
    """The step before the checkpoint, the one before the evaluation and the last one are rejected."""
    row = ROWS["fp16, overflows, evaluation"]
    flags = _flags(row, 2, f"--ckpt-format {form}")
    spoiled = "4:1:nan,6:1:inf,9:1:nan,16:1:inf"
    logs = []
    for schedule, more in ((None, ()), ("zb-h2", ("--zero-bubble-post-validation",))):
        folder = str(tmp_path / str(schedule))
        until = ("--save", folder, "--save-interval", "3", "--exit-interval", "6")
        first = pretrain_gpt(checkout, 2, flags, schedule, (*more, *until), spoiled=spoiled)
        assert "exiting program at iteration 6" in first.text, first.text[-2000:]
        second = pretrain_gpt(checkout, 2, flags, schedule, (*more, "--load", folder), spoiled=spoiled)
        assert re.match(r"iteration +7/", second.figures[0]), second.figures
        logs.append([*first.figures, *first.weights, *second.figures, *second.weights])
    assert logs[1] == logs[0]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_job_that_was_killed_resumes(checkout: Checkout, how: signal.Signals, tmp_path: Path) -> None:
    """A killed job resumes from its last checkpoint, a terminated one from where it saved, as stock does from there.

    Since core_r0.16 a resumed stock run differs slightly from an uninterrupted one, so that both sides are resumed.
    """
    row = ROWS["fp16, overflows, evaluation"]
    flags = f"{_flags(row, 2, '--ckpt-format torch_dist --exit-signal-handler')} --train-iters 400"
    save = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "20", "--zero-bubble-post-validation")
    job = replace(gpt_job(checkout, 2, flags, "zb-h2", save), spoiled="24:1:nan,25:1:inf")
    with running(job, checkout) as started:
        started.wait_for("iteration       26/")
        for rank in started.ranks:
            rank.send(how)
        started.wait(120)
    done = max(int(folder.name.partition("_")[2]) for folder in tmp_path.glob("iter_*"))
    assert done >= 26 if how is signal.SIGTERM else done >= 20
    spoiled, resumed = f"{job.spoiled},{done + 3}:1:nan", ("--load", str(tmp_path), "--exit-interval", str(done + 12))
    again = _ahead(checkout, 2, flags, "zb-h2", spoiled, resumed)
    assert re.match(rf"iteration +{done + 1}/", again.figures[0]), again.figures
    _same(again, stock(checkout, 2, flags, resumed, spoiled))
    assert len(again.figures) >= 12 and _counts(again)["repeated"]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_stage_without_parameters_follows_a_rejected_step(checkout: Checkout) -> None:
    """Its rank has no learning rate of its own in some versions, and in core_r0.13 no optimizer."""
    layout = "--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett||ttL"
    flags = f"{layout} --global-batch-size 7 --train-iters 12 {_UNTIED} {_LOOSE}"
    own = _ahead(checkout, 3, flags, "zb-h2", "4:2:1e6,10:0:1e6")
    _same(own, stock(checkout, 3, flags, (), "4:2:1e6,10:0:1e6"))
    assert _counts(own)["repeated"] == 1


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
@pytest.mark.parametrize("more", ["--async-save", "--non-persistent-save-interval 5 --non-persistent-ckpt-type global"])
def test_other_checkpoints_hold_the_final_step(checkout: Checkout, more: str, tmp_path: Path) -> None:
    """The step before each checkpoint is rejected; stock continues from it as from its own."""
    row = ROWS["fp16, overflows, evaluation"]
    flags = _flags(row, 2, "--ckpt-format torch_dist")
    interval, kind = ("20", ("--non-persistent-ckpt-type", "global")) if "non-persistent" in more else ("5", ())
    logs = []
    for schedule, own in ((None, ()), ("zb-h2", ("--zero-bubble-post-validation",))):
        folder = str(tmp_path / str(schedule))
        until = ("--save", folder, "--save-interval", interval, "--exit-interval", "10", *more.split())
        first = pretrain_gpt(checkout, 2, flags, schedule, (*own, *until), spoiled="5:1:nan,10:1:inf")
        assert "exiting program at iteration 10" in first.text, first.text[-2000:]
        second = pretrain_gpt(checkout, 2, flags, None, ("--load", folder, *kind))
        assert re.match(r"iteration +11/", second.figures[0]), second.figures
        logs.append([*first.figures, *first.weights, *second.figures, *second.weights])
    assert logs[1] == logs[0]


@pytest.mark.parametrize("checkout", NEWEST, ids=str)
def test_fp8_with_delayed_scaling_is_refused(checkout: Checkout) -> None:
    flags = _flags(Row("--fp8-format hybrid --fp8-recipe delayed", ""), 2)
    log = pretrain_gpt(checkout, 2, flags, "zb-h2", ("--zero-bubble-post-validation",))
    assert "post-validation does not support FP8 with delayed scaling" in log.text, log.text[-3000:]
